"""Compare PPO on PushCube with bare physics: one call of `mujoco.rollout` for the steps of a rollout.

All contestants use the same cores, with one thread per core. MuJoCo alone repeats the controls of ecrl's first rollout
from its initial states. ecrl's environment alone repeats the actions of this rollout, with task, resets and
observations. The third contestant runs whole iterations of `configs/push_cube_ppo.json`, collecting and learning. Two
more contestants are MuJoCo and the environment with a robot that has meshes, the arm `example:panda`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.other_libraries import as_work
from benchmarks.pairs import ROOT, Contestant, Result, race, ratios, summary

CONFIG = ROOT / "configs" / "push_cube_ppo.json"
MESHES = "example:panda"
MOST = {"environment": (1.25, None), "iteration": (1.6, 1.4), "meshes": (1.3, None)}
"""Required and desired times of contestants, as multiples of the time of bare physics."""


def config(robot: str | None = None, **keys: Any) -> Any:
    """Return the config of an endless run, with another robot if `robot` is given."""
    from ecrl import load_config

    keys |= {} if robot is None else {"env.cfg.robot": {"model": robot}}
    return load_config(CONFIG).replace(**{"trainer.iterations": 10**6, **keys})


def first_rollout(robot: str | None = None) -> tuple[Any, Any]:
    """Collect the first batch of a run eagerly. Return the initial state of the run, and the steps of the batch."""
    from ecrl import init_state
    from ecrl.loop.build import build

    cfg = config(robot, **{"trainer.compile": "off"})
    state = init_state(cfg)
    run = build(cfg)
    return state, run.algorithm.iterate.collect(run, state)[1]["steps"]


def recorded(robot: str | None = None) -> tuple[Any, Any, Any, int]:
    """Return the model, states `[T, N, nstate]`, controls `[T, N, nu]` and number of substeps of the first rollout."""
    from unittest.mock import patch

    import torch

    from ecrl.envs.mujoco.physics import step_op as physics
    from ecrl.envs.mujoco.scene.models import loaded

    cfg, calls, handles, step = config(robot), [], [], physics.step

    def recording_step(state: Any, control: Any, parameters: Any, *, handle: int, substeps: int) -> Any:
        if len(state) == cfg.trainer.num_envs:
            calls.append((state.clone(), control.clone()))
            handles.append((handle, substeps))
        return step(state, control, parameters, handle=handle, substeps=substeps)

    with patch.object(physics, "step", recording_step):
        first_rollout(robot)
    states, controls = (torch.stack(x[-cfg.trainer.buffer_size :]).numpy() for x in zip(*calls, strict=True))
    model = loaded(handles[-1][0]).model
    return model, states, controls[..., : model.nu], handles[-1][1]


def replay(threads: int, robot: str | None = None) -> tuple[Callable[[], Any], Any, int]:
    """Return a function that repeats all environments' steps in one call, the recorded states, and the substeps.

    The function returns MuJoCo's full physics state after every substep, `[N, T * substeps, ...]`. The function never
    resets an environment, so its states agree with the recorded states `[T, N, nstate]` only until an episode ends.
    """
    import numpy as np
    from mujoco import rollout

    from ecrl.envs.mujoco.scene.models import STATE
    from ecrl.envs.mujoco.scene.models import mujoco as load_mujoco

    model, states, controls, substeps = recorded(robot)
    mujoco = load_mujoco()
    datas, full = [mujoco.MjData(model) for _ in range(threads)], int(mujoco.mjtState.mjSTATE_FULLPHYSICS)
    state_spec = sum(int(getattr(mujoco.mjtState, f"mjSTATE_{name}")) for name in STATE)
    initial_states = np.empty((states.shape[1], mujoco.mj_stateSize(model, full)))
    for row, state in zip(initial_states, states[0], strict=True):
        mujoco.mj_setState(model, datas[0], state, state_spec)
        mujoco.mj_getState(model, datas[0], row, full)
    control_sequence = np.repeat(controls.swapaxes(0, 1), substeps, axis=1)
    pool = rollout.Rollout(nthread=threads)
    kind = int(mujoco.mjtState.mjSTATE_CTRL)

    return lambda: pool.rollout(model, datas, initial_states, control_sequence, control_spec=kind)[0], states, substeps


def bare(threads: int, robot: str | None = None) -> Callable[[], int]:
    """Return a function that runs the bare physics of a rollout, and returns its number of environment steps."""
    run_rollout, states, _ = replay(threads, robot)

    def rollouts() -> Iterator[None]:
        while True:
            run_rollout()
            yield

    return as_work(rollouts(), states.shape[0] * states.shape[1])


def environment(robot: str | None = None) -> Callable[[], int]:
    """Return a function that repeats the actions of the first rollout in the environment, and returns the env steps.

    The rollout is compiled as in training.
    """
    from ecrl.algorithms.core import step_keys
    from ecrl.loop.build import build

    cfg = config(robot)
    run, size, length = build(cfg), cfg.trainer.num_envs, cfg.trainer.buffer_size
    state, rollout = first_rollout(robot)
    keys = step_keys(run, state)[0]
    actions = rollout["action"][:, :-1].transpose(0, 1).contiguous()
    rollout_function = run.jit(_roll, run.env, run.scan)

    def rollouts() -> Iterator[None]:
        while True:
            rollout_function(state["env"], actions, keys)
            yield

    return as_work(rollouts(), size * length)


def _roll(env: Any, loop: Any, state: Any, actions: Any, keys: Any) -> Any:
    """Return the state after one step per row of actions."""
    return loop(lambda now, row: (env.step(now, *row), row[0][..., 0]), state, (actions, env.draw(keys)))[0]


def iteration() -> Callable[[], int]:
    """Return a function that runs a whole PPO iteration, and returns its number of environment steps."""
    from ecrl import init_state, make_iteration

    cfg = config()

    def iterations() -> Iterator[None]:
        state, iterate = init_state(cfg), make_iteration(cfg)
        while True:
            state, _ = iterate(state)
            yield

    return as_work(iterations(), cfg.trainer.num_envs * cfg.trainer.buffer_size)


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows for the environment, the iteration and a robot with meshes, on two cores if available."""
    cores = cores[:2]
    field = [
        Contestant("mujoco.rollout", "benchmarks.physics:bare", {"threads": len(cores)}),
        Contestant("environment", "benchmarks.physics:environment"),
        Contestant("iteration", "benchmarks.physics:iteration"),
        Contestant("mujoco.rollout with meshes", "benchmarks.physics:bare", {"threads": len(cores), "robot": MESHES}),
        Contestant("meshes", "benchmarks.physics:environment", {"robot": MESHES}),
    ]
    bare_arm, *of_arm, bare_meshes, meshes = race(
        field, cores, rounds=3 if quick else 11, seconds=0.5 if quick else 1.0
    )
    pairs = [*((result, bare_arm) for result in of_arm), (meshes, bare_meshes)]
    return [result_row(result, mujoco, len(cores)) for result, mujoco in pairs]


def result_row(ecrl: Result, mujoco: Result, cores: int) -> dict[str, Any]:
    """Return a row with ecrl's time per step as a multiple of the time of bare physics.

    >>> result_row(Result("iteration", [1.0], 1.0, {}, 0.0), Result("bare", [2.0], 1.0, {}, 0.0), 2)["times_bare"]
    2.0
    """
    out: dict[str, Any] = {"what": ecrl.name, "cores": cores}
    out |= {f"{who}_steps_per_s": summary(r.rates)["median"] for who, r in (("ecrl", ecrl), ("mujoco", mujoco))}
    if errors := [r.error for r in (ecrl, mujoco) if r.error is not None]:
        return out | {"error": "; ".join(errors)}
    by_round, (most, aim) = summary(ratios(mujoco, ecrl)), MOST[ecrl.name]
    out |= {"times_bare": by_round["median"], "times_min": by_round["min"], "times_max": by_round["max"]}
    return out | {"most": most, "aim": aim, "met": bool(out["times_bare"] <= most)}


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the time of each row as a multiple of bare physics, with a line at 1."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if "times_bare" in row]
    picture = Figure(figsize=(5, 3), layout="constrained")
    axes = picture.subplots()
    axes.bar([row["what"] for row in measured], [row["times_bare"] for row in measured])
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set(ylabel="times mujoco.rollout", title="PushCube, 64 environments")
    return picture
