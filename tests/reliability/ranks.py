"""Two ranks with N environments each against one rank with 2N: `python tests/reliability/ranks.py`.

A scenario is a config, changes of it, and a number of iterations. Every rank writes its last state. Settings per rank
are for one of two ranks; a single rank has all environments and all rows of a minibatch.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support.catch import NETWORK, catching
from support.chunks import chunked
from support.demos import balancing, recording
from support.dots import reaching
from support.token_agent import speaking

import ecrl
from ecrl import distributed, rng
from ecrl.algorithms.core import step_keys
from ecrl.loop.build import build

ROOT = Path(__file__).resolve().parents[2]
ENVS, STEPS = 4, 32
PATIENCE_S = 1200.0
"""A rank that takes longer hangs."""


class Scenario(NamedTuple):
    """Keys for one of two ranks; `double` for float64. The config is a preset or a dictionary."""

    config: str | dict[str, Any]
    iterations: int
    keys: dict[str, Any]
    double: bool = False


MOMENTS = {"policy.normalize_obs": True, "algorithm.cfg.normalize_reward": True}
FULL = {"algorithm.cfg.n_epochs": 1, "algorithm.cfg.batch_size": ENVS * STEPS, "trainer.buffer_size": STEPS}
USUAL = {"algorithm.cfg.batch_size": 48, "trainer.buffer_size": STEPS, "algorithm.cfg.n_epochs": 3}
_NET = {"network_cfg": {"hidden_sizes": []}}
REMEMBERING = {
    "env.frame_stack": 3,
    "policy": {"name": "recurrent", "encoder": NETWORK, "cell": {"hidden_size": 8}, "actor": _NET, "critic": _NET},
    "algorithm.cfg.segment_length": 8,
}
CLONE = recording(algorithm={"name": "bc", "cfg": {"demos": os.environ.get("DEMOS", "none")}}).model_dump(mode="json")
_TOKENS = {"ratio": "token", "loss_mean": "sequence", "advantage": "episode", "group_size": 2, "drop_masked": True}
_LIMITS = {"min_group_score": 0.0, "max_group_score": 1.0}
_SPEAKING = {"algorithm": {"name": "grpo", "cfg": _TOKENS | _LIMITS}}
# Adam would enlarge rounding errors of gradients near 0
_PLAIN = {"algorithm.cfg.learning_rate": None, "algorithm.cfg.optimizer": {"name": "sgd", "learning_rate": 0.1}}
SCENARIOS = {
    "double": Scenario("pendulum_ppo", 5, FULL, double=True),
    "single": Scenario("pendulum_ppo", 1, FULL),
    "moments": Scenario("pendulum_ppo", 3, FULL | MOMENTS),
    "usual": Scenario("pendulum_ppo", 20, USUAL | {"policy.normalize_obs": True, "algorithm.cfg.target_kl": 0.05}),
    "groups": Scenario("cartpole_grpo", 5, {"trainer.buffer_size": STEPS, "algorithm.cfg.batch_size": 48}),
    "gradients": Scenario("point_mass_apg", 5, {"trainer.buffer_size": STEPS}),
    "values": Scenario("cartpole_pqn", 3, FULL, double=True),
    "tokens": Scenario(speaking(**_SPEAKING).model_dump(mode="json"), 3, FULL),
    "chunks": Scenario(chunked().model_dump(mode="json"), 2, FULL),
    "clones": Scenario(CLONE, 3, FULL | {"policy.normalize_obs": True, "algorithm.cfg.holdout": 0.25}),
    "images": Scenario(catching().model_dump(mode="json"), 3, FULL),
    "instructions": Scenario(reaching("grpo").model_dump(mode="json"), 3, FULL | _PLAIN),
    "memory and frames": Scenario(catching().model_dump(mode="json"), 3, FULL | REMEMBERING),
}


def config(scenario: Scenario, size: int, form: str) -> ecrl.Config:
    """The config of one of `size` ranks that have 2 * ENVS environments together."""
    keys = {"trainer.num_envs": ENVS * 2 // size, "trainer.compile": form, **scenario.keys}
    if "algorithm.cfg.batch_size" in keys:
        keys["algorithm.cfg.batch_size"] = keys["algorithm.cfg.batch_size"] * 2 // size
    return ecrl.load_config(scenario.config, keys)


def end_of(scenario: Scenario, form: str) -> dict[str, torch.Tensor]:
    """Parameters, statistics and counters after the iterations, and the random keys that this rank began with."""
    cfg = config(scenario, distributed.world_size(), form)
    state = ecrl.init_state(cfg)
    if scenario.double:
        state = state.clone().apply(lambda x: x.double() if x.is_floating_point() else x)
    keys = step_keys(build(cfg), state)
    iterate = ecrl.make_iteration(cfg)
    for _ in range(scenario.iterations):
        state, logs = iterate(state)
    end = {name: leaf for name, leaf in state.flatten_keys("/").items() if name.split("/")[0] in ("params", "norm")}
    end |= {name: state[name] for name in ("sample_step", "update_step", "decision_step") if name in state}
    end |= {f"log/{name}": x for part in logs.values() for name, x in part.items()}
    end |= {f"noise/{i}": rng.normal(k, (2,)) for i, k in enumerate(keys)}
    return {name: leaf.clone().contiguous() for name, leaf in end.items()}


def write(names: list[str], form: str, out: Path) -> None:
    """Run the scenarios on this rank, and write its last state."""
    torch.set_num_threads(1)
    distributed.start(True)
    for name in names:
        save_file(end_of(SCENARIOS[name], form), out / f"{name}_{distributed.world_size()}_{distributed.rank()}")
    distributed.stop()


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def launched(size: int, arguments: list[str], **environ: str) -> list[subprocess.Popen[str]]:
    """So many ranks of a command, as torchrun would start them."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environ
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **common, "RANK": str(i), "LOCAL_RANK": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(size)
    ]


def ended(ranks: list[subprocess.Popen[str]], patience: float = PATIENCE_S) -> list[str]:
    """Return what the ranks printed, after all succeeded; if one fails, end the others, as torchrun does."""
    until = time.monotonic() + patience
    while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks) and time.monotonic() < until:
        time.sleep(0.1)
    statuses = [process.poll() for process in ranks]
    for process in ranks:
        process.kill()
    outputs = [process.communicate()[0] for process in ranks]
    if any(statuses):
        texts = "".join(
            text[-3000:] for status, text in zip(statuses, outputs, strict=True) if status is None or status
        )
        raise AssertionError(f"ranks ended with statuses {statuses}: {texts}")
    return outputs


def both(names: list[str], form: str, out: Path) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Return by scenario the last states of one rank, and of each of two ranks."""
    shutil.copy(balancing().path, out / "demos")
    for size in (1, 2):
        ended(launched(size, [__file__, json.dumps(names), form, str(out)], DEMOS=str(out / "demos")))
    places = [(1, 0), (2, 0), (2, 1)]
    return {name: [load_file(out / f"{name}_{size}_{rank}") for size, rank in places] for name in names}


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], part: str) -> float:
    """The largest difference of tensors whose names begin so."""
    return max(float((x - two[name]).abs().max()) for name, x in one.items() if name.startswith(part))


def main() -> None:
    """Print the figures of all scenarios, eager and compiled."""
    import tempfile

    for form in sys.argv[1:] or ("off", "on"):
        with tempfile.TemporaryDirectory() as folder:
            for name, (one, first, second) in both(list(SCENARIOS), form, Path(folder)).items():
                equal = all(torch.equal(x, second[key]) for key, x in first.items() if key.startswith("params"))
                message = f"compile {form}, {name}: one rank and two differ by {distance(one, first, 'params'):.2g}"
                print(f"{message}; the weights of the two are {'' if equal else 'NOT '}equal", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        write(json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    else:
        main()
