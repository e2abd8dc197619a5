"""Compare the frames per second of 64 x 64 camera images of MuJoCo tasks in the qualities "fast" and "full".

Two contestants render the same 64 states of a task in each unit of work, as a step of 64 environments does. A third
contestant steps 64 environments with a fast camera in their observations. The actions are random, so the episodes end
at different times.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.other_libraries import as_work
from benchmarks.pairs import Contestant, Result, race, ratios, summary

TASKS, ENVS = ("PushCubeRL", "ReachRL"), 64
VIEW = {"resolution": [64, 64], "intrinsics": [60, 60, 32, 32], "eye": [-1.4, 1.4, 2.0], "target": [0, 0, 0]}
MUST, AIM = 1500.0, 2500.0
"""Required and desired frames per second of quality "fast" on one core."""


def frames(task: str, quality: str) -> Callable[[], int]:
    """Return a function that renders one image of each environment, and returns the number of images."""
    from ecrl import rng
    from ecrl.envs import make_env
    from ecrl.envs.mujoco.camera_config import CameraConfig
    from ecrl.envs.mujoco.render_op import camera_handle, image

    env = make_env(task)
    state = env.reset(rng.split(rng.key(0), ENVS))
    handle = camera_handle(env.scene, CameraConfig.model_validate(VIEW | {"quality": quality}))

    def images() -> Iterator[None]:
        while True:
            image(handle, state)
            yield

    return as_work(images(), ENVS)


def steps(task: str) -> Callable[[], int]:
    """Return a function that steps 64 environments once, with a fast camera in the observation, and returns 64."""
    import torch

    from ecrl import rng
    from ecrl.envs import auto_reset, make_env

    camera = {"func": "camera_image", "name": "camera", "params": VIEW}
    env: Any = auto_reset(make_env({"name": task, "cfg": {"observations": {"camera": camera}}}))

    def rollout() -> Iterator[None]:
        state, keys = env.reset(rng.split(rng.key(0), ENVS)), rng.split(rng.key(1), ENVS)
        while True:
            noise = env.draw(rng.fold_in(keys.expand(32, -1), torch.arange(32).unsqueeze(-1)))
            actions = 2.0 * rng.uniform(keys, (32, *env.action_space.shape)).transpose(0, 1) - 1.0
            for t in range(32):
                state = env.step(state, actions[t], noise[t])
                yield
            keys = rng.fold_in(keys, 32)

    return as_work(rollout(), ENVS)


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per task and number of cores, one or two."""
    out = []
    for count in sorted({1, min(2, len(cores))}):
        for task in TASKS:
            field = [
                Contestant("fast", "benchmarks.cameras:frames", {"task": task, "quality": "fast"}),
                Contestant("full", "benchmarks.cameras:frames", {"task": task, "quality": "full"}),
                Contestant("steps", "benchmarks.cameras:steps", {"task": task}),
            ]
            results = race(field, cores[:count], rounds=3 if quick else 11, seconds=0.3 if quick else 1.0)
            out.append(result_row(task, count, *results))
    return out


def result_row(task: str, cores: int, fast: Result, full: Result, env: Result) -> dict[str, Any]:
    """Return a row with the frames per second of both qualities. The targets are for one core, else `met` is None.

    >>> results = [Result(name, [rate], 1.0, {}, 0.0) for name, rate in (("fast", 2e3), ("full", 2e2), ("steps", 1e3))]
    >>> row = result_row("ReachRL", 1, *results)
    >>> row["times_full"], row["met"], result_row("ReachRL", 2, *results)["met"]
    (10.0, True, None)
    """
    out: dict[str, Any] = {"task": task, "cores": cores}
    rates = {"fast_frames_per_s": fast, "full_frames_per_s": full, "camera_steps_per_s": env}
    out |= {name: summary(result.rates)["median"] for name, result in rates.items()}
    out["best_fast_frames_per_s"] = max(fast.rates, default=None)
    if errors := [result.error for result in (fast, full, env) if result.error is not None]:
        return out | {"error": "; ".join(errors)}
    by_round = summary(ratios(fast, full))
    out |= {"times_full": by_round["median"], "times_min": by_round["min"], "times_max": by_round["max"]}
    met = bool(out["fast_frames_per_s"] >= MUST) if cores == 1 else None
    return out | {"must": MUST, "aim": AIM, "met": met}


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the frames per second of both qualities for each task and number of cores."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if "times_full" in row]
    picture = Figure(figsize=(6, 3), layout="constrained")
    axes = picture.subplots()
    for shift, name in ((-0.2, "fast"), (0.2, "full")):
        places = [place + shift for place in range(len(measured))]
        axes.bar(places, [row[f"{name}_frames_per_s"] for row in measured], width=0.4, label=name)
    labels = [f"{row['task']}, {row['cores']} core{'s' * (row['cores'] > 1)}" for row in measured]
    axes.set_xticks(range(len(measured)), labels)
    axes.set(ylabel="frames of 64 x 64 per second", yscale="log")
    axes.legend()
    return picture
