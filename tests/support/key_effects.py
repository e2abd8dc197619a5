"""Observable effects of a config: each function trains, evaluates or starts BASE with `changes`.

Results can be compared with `==`. Equal changes give equal results, which are cached.
"""

import hashlib
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load as tensors_from_bytes

from ecrl import rng
from ecrl.algorithms.core import collect
from ecrl.algorithms.rows import rows_of
from ecrl.config import Config, config_from_dict
from ecrl.envs import make_env
from ecrl.errors import ConfigError, UserError
from ecrl.loop.build import build, device_of, form_of
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import policy_params
from ecrl.run.checkpoint import latest, read_manifest
from ecrl.run.evaluation import with_evaluation
from ecrl.run.train import train, train_from_config
from support import fake_atari
from support.wandb_files import logged

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
BASE = {
    "trainer": {"num_envs": 8, "buffer_size": 8, "iterations": 2, "compile": "off"},
    "env": {"name": "cartpole"},
    "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "ppo", "cfg": {"n_epochs": 2, "batch_size": 32}},
}
Changes = dict[str, Any]
See = Callable[[Changes], Any]


def made(changes: Changes) -> Config:
    """The config of BASE with dotted keys changed."""
    return config_from_dict(BASE, "every key", changes)


def remembered(see: See) -> See:
    """`see` that looks once at equal changes; the looking itself is `see.again`."""
    known = cache(lambda text: see(json.loads(text)))

    def look(changes: Changes) -> Any:
        return known(json.dumps(changes, sort_keys=True))

    look.again, look.__name__ = see, see.__name__
    return look


FEW_STEPS = patch(
    "ecrl.run.evaluation._CHUNK", 5
)  # between looks at whether all episodes are done: they are short here


def _closed(cfg: Config, state: Any) -> None:
    build(cfg).env.close(state["env"])


@remembered
def params(changes: Changes) -> dict[str, Any]:
    """The parameters after training, to the bit."""
    cfg = made(changes)
    *_, record = train_iter(init_state(cfg), cfg)
    _closed(cfg, record["state"])
    weights: Any = record["state"]["params"]
    leaves = dict(weights.flatten_keys(".").items())
    assert all(leaf.isfinite().all() for leaf in leaves.values())
    return {name: (list(leaf.shape), leaf.numpy().tobytes()) for name, leaf in leaves.items()}


@remembered
def imitation(changes: Changes) -> list[float]:
    """The loss of imitating the first actions of the run's own policy."""
    cfg = made(changes)
    run, state = build(cfg), init_state(cfg)
    rows = rows_of(run, collect(run, state)[1])
    return run.policy.imitation_rows(policy_params(state), rows).tolist()


@remembered
def played(changes: Changes) -> tuple:
    """Take steps in an environment, and return the observations, the rewards and the ends of episodes."""
    with fake_atari.with_cv2():
        env, rows = make_env(made(changes).env), []
        state: Any = env.reset(rng.split(rng.key(2), 2))
        for t in range(60):
            rows += [state[name].numpy().tobytes() for name in ("obs", "reward", "terminated")]
            state = env.step(state, torch.tensor([3, t % 4]), None)
        env.close(state)
    return tuple(rows)


@remembered
def evaluations(changes: Changes) -> list[Any]:
    """Step and logs of every evaluation during training."""
    cfg = made(changes)
    records = train_iter(init_state(cfg), cfg)
    records = with_evaluation(records, cfg) if cfg.trainer.enable_eval else records
    with FEW_STEPS:
        evaluated = [record for record in records if record["log_type"] == "evaluate"]
    logs = [(record["sample_step"], {name: float(x) for name, x in record["logs"].items()}) for record in evaluated]
    assert all(value == value for _, log in logs for value in log.values())
    return logs


@remembered
def files(changes: Changes) -> dict[str, Any]:
    """Return what training writes to its folder: the states of the checkpoints, and the names of all other files."""
    cfg = made(changes)
    with tempfile.TemporaryDirectory() as folder:
        state, _ = train(init_state(cfg), cfg, folder, progress=False)
        _closed(cfg, state)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        names = {str(path.relative_to(folder)) for path in paths}
        states = {n: hashlib.sha256((Path(folder) / n).read_bytes()).hexdigest() for n in names if "state." in n}
        return {re.sub(r"tfevents.*", "tfevents", name): states.get(name) for name in names}


@remembered
def best(changes: Changes) -> int:
    """Return the step of `checkpoints/best`."""
    cfg = made(changes)
    with tempfile.TemporaryDirectory() as folder, FEW_STEPS:
        train(init_state(cfg), cfg, folder, progress=False)
        return read_manifest(Path(folder) / "checkpoints" / "best")["sample_step"]


@remembered
def saved_replay(changes: Changes) -> list[str]:
    """The names of the buffer's tensors in the last checkpoint of the test agent with a replay buffer."""
    from support.replay_agent import CAPACITY, NET  # here, because it registers the agent

    agent = {"name": "replay_td", "cfg": {"capacity": 8 * CAPACITY, "batch_size": 16}}
    cfg = made({"algorithm": agent, "policy": {"name": "replay_q", "critic": NET}, **changes})
    with tempfile.TemporaryDirectory() as folder:
        train(init_state(cfg), cfg, folder, progress=False)
        tensors = tensors_from_bytes((latest(folder) / "state.safetensors").read_bytes())
        return sorted(name for name in tensors if name.startswith("replay/"))


def _launched(changes: Changes) -> str:
    """The run folder of `ecrl train`, without its time."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(io.StringIO()):
        Path("run.json").write_text(json.dumps(made(changes).model_dump(mode="json")))
        train_from_config("run.json")
        (run,) = Path("outputs").iterdir()
        return re.sub(r"_\d{8}_\d{6}$", "", run.name)


folder_name = remembered(_launched)


@remembered
def one_of_two(changes: Changes) -> str:
    """Return the output of a process that torchrun started as one of two."""
    with patch.dict(os.environ, {"WORLD_SIZE": "2"}):
        try:
            return _launched(changes)
        except ConfigError as error:
            assert "RANK is not set" in str(error)
            return "refused"


@contextmanager
def _two_gpus() -> Iterator[None]:
    """Torch believes that there are two; nothing is put on them."""
    room = patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=10**12))
    with patch("torch.cuda.is_available", lambda: True), patch("torch.cuda.device_count", lambda: 2), room:
        yield


@remembered
def device(changes: Changes) -> str:
    """Return the device of a run on a machine with two GPUs."""
    with _two_gpus():
        return str(device_of(made(changes)))


@remembered
def form(changes: Changes) -> tuple[str, str]:
    """Return "compiled" or "eager" and the reason, as a run on a GPU with all compilers prints them."""
    with _two_gpus(), patch("ecrl.compile.jit.gpu_fault", lambda: None):
        return form_of(made({"trainer.device": "cuda", **changes}))[:2]


@remembered
def matrices(changes: Changes) -> list[str]:
    """Return the precisions of matrix products that an iteration on a GPU sets."""
    state, precisions = init_state(made({})), []
    with _two_gpus():
        iteration = make_iteration(made({"trainer.device": "cuda", **changes}))
    with patch("torch.set_float32_matmul_precision", precisions.append):
        iteration(state)
    return precisions


def refused(match: str) -> See:
    """Return an effect: True if training is refused with a message that `match` fits."""

    def refusal(changes: Changes) -> bool:
        try:
            cfg = made(changes)
            for _ in train_iter(init_state(cfg), cfg):
                pass
        except UserError as error:
            assert re.search(match, str(error)), error
            return True
        return False

    return remembered(refusal)


def _children() -> int:
    """Return the number of child processes of this process."""
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


@remembered
def processes(changes: Changes) -> bool:
    """Return True if the environments run in separate processes."""
    cfg, before = made(changes), _children()
    state = init_state(cfg)
    try:
        return _children() > before
    finally:
        _closed(cfg, state)


@remembered
def answer(changes: Changes) -> str:
    """Train in environments whose steps take a second; return "in time" or "too late"."""
    cfg, begun = made(changes), time.monotonic()
    try:
        state = init_state(cfg)
        for record in train_iter(state, cfg):
            state = record["state"]
        _closed(cfg, state)
    except UserError as error:
        assert "did not answer within" in str(error)
        return "too late"
    assert time.monotonic() - begun > 1.0
    return "in time"


@remembered
def tracked(changes: Changes) -> tuple | None:
    """Return project and name of W&B's offline record and its number of rows; None if there is no record."""
    wandb = pytest.importorskip("wandb")
    cfg = made(changes)
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, quiet | {"HOME": folder}):
        try:
            train(init_state(cfg), cfg, folder, progress=False)
        finally:
            wandb.teardown()
        if not (Path(folder) / "wandb").exists():
            return None
        (project, name), _, rows, _ = logged(folder)  # pyright: ignore
        return project, name, len(rows)


_RAISES_LEVEL = {  # fields with which the next step of a game of MinAtar raises the level, and the action
    "minatar_asterix": ({"ramp_wait": -1}, 0),
    "minatar_space_invaders": ({"aliens": [0] * 5 + [16] + [0] * 4, "shots": [0] * 6 + [16] + [0] * 3}, 0),
    "minatar_seaquest": ({"y": 1, "divers": 2, "surfaced": False}, 2),
}


@remembered
def level(changes: Changes) -> int:
    """The level of a game of MinAtar after a step that can raise it."""
    choice = made(changes).env
    env, (fields, action) = make_env(choice), _RAISES_LEVEL[choice.name]
    keys = rng.split(rng.key(0), 1)
    state, noise = env.reset(keys), env.draw(keys)
    state = state.update({name: torch.tensor([value], dtype=state[name].dtype) for name, value in fields.items()})
    noise["repeats"] = torch.zeros_like(noise["repeats"])
    return int(env.step(state, torch.tensor([action]), noise)["level"])
