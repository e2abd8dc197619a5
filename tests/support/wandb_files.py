"""Reading the files that an offline run of Weights & Biases leaves."""

import json
import struct
from pathlib import Path


def entries(data):
    """Records of W&B's file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    position, parts = 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last of its parts
            yield b"".join(parts)
            parts = []


def logged(folder):
    """(project and name, config, rows, exit codes) of the one offline run in `folder`."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = Path(folder).glob("wandb/offline-run-*/*.wandb")
    config, rows, exits, name = {}, [], [], None
    for data in entries(path.read_bytes()):
        parsed = Record.FromString(data)
        kind = parsed.WhichOneof("record_type")
        if kind == "run":
            config |= {item.key: json.loads(item.value_json) for item in parsed.run.config.update}
            name = (parsed.run.project, parsed.run.display_name)
        elif kind == "history":
            pairs = ((item.key or "/".join(item.nested_key), item.value_json) for item in parsed.history.item)
            rows.append({key: json.loads(value) for key, value in pairs})
        elif kind == "exit":
            exits.append(parsed.exit.exit_code)
    return name, config, rows, exits
