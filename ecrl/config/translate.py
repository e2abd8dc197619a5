"""Translate configs of EmbodiChain and flags of abcdRL into ecrl's keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecrl.config import embodichain
from ecrl.config.abcdrl import (
    Translated,
    buffer_size_faults,
    context_of,
    flag_fault,
    flags_in_config,
    flags_in_overrides,
    translate_flags,
    with_values,
)
from ecrl.config.aliases import MISSING, RawConfig, get_path, set_path, split_path
from ecrl.config.model import Loc, repeated_keys

_BUFFER_SIZE, _ENABLE_EVAL = "trainer.buffer_size", ("trainer", "enable_eval")


def _origins(translated: Translated) -> dict[Loc, str]:
    """Map the path of each key that a flag set to the name of the flag."""
    return {split_path(key): flag for key, flag in translated.names.items()}


def translate_config(
    data: dict[str, Any], overrides: Mapping[str, Any], folder: Path, defaults: Mapping[str, Any]
) -> RawConfig:
    """Translate a config into ecrl's own keys.

    Flags of abcdRL in the config become keys of the config. Flags in the overrides become overrides of keys. An
    override replaces the config's value, even if the two use different names. Flags of the evaluator enable
    evaluations, unless `trainer.enable_eval` is given.

    Args:
        data: config before translation, which the function does not change.
        overrides: dict from dotted key to a value that replaces the config's value.
        folder: folder in which ecrl looks for a relative `trainer.gym_config` that is not in the working directory.
        defaults: dict with the default values of `buffer_size` and `num_envs` in the trainer section.
    """
    written, changed = flags_in_config(data), flags_in_overrides(overrides)
    raw = embodichain.translate_config(written.rest, changed.rest, folder, defaults)
    flags = written.flags | changed.flags
    faults = [fault for fault in repeated_keys(data) if fault not in raw.faults]
    faults += written.faults + changed.faults
    if not flags or (context := context_of(raw, flags, defaults)) is None:
        return raw._replace(faults=[*faults, *raw.faults])
    faults += buffer_size_faults(written, get_path(data, split_path(_BUFFER_SIZE)), context)
    faults += buffer_size_faults(changed, overrides.get(_BUFFER_SIZE, MISSING), context)
    in_config, in_overrides = (translate_flags(taken.flags, context) for taken in (written, changed))
    translated, repeated = with_values(written.rest, in_config)
    for key, flag in in_overrides.names.items():
        if key in changed.rest:
            repeated.append(flag_fault(flag, f"sets {key!r}, which is also given; keep one"))
    evaluates = any(flag.startswith("evaluator.") for flag in flags) and isinstance(data.get("trainer", {}), dict)
    if evaluates and get_path(raw.data, _ENABLE_EVAL) is MISSING:
        translated = set_path(translated, _ENABLE_EVAL, True)
    raw = embodichain.translate_config(translated, in_overrides.values | changed.rest, folder, defaults)
    return RawConfig(
        raw.data,
        _origins(in_config) | raw.origins | _origins(in_overrides),
        [*faults, *in_config.faults, *in_overrides.faults, *repeated, *raw.faults],
        [*in_config.inert, *in_overrides.inert, *raw.inert],
    )
