"""Compare 64 seeds of PPO on CartPole, trained together, with the same seeds in sequence and with rejax under vmap.

A unit of work is one iteration of all seeds. Every contestant has one thread per core.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.other_libraries import STEPS, as_work
from benchmarks.pairs import Contestant, Result, race, ratios, summary

SEEDS = 64
NUM_ENVS = {"quick": (4,), "full": (4, 32)}
CONTESTANTS = ("together", "in_turn", "rejax")
MOST = {4: {"in_turn": 0.5, "rejax": 0.8}, 32: {"in_turn": 0.9, "rejax": 0.8}}
"""Targets for the time of "together" divided by the time of another contestant, by number of environments per seed."""


def config(num_envs: int) -> Any:
    """Return the config of `benchmarks.scaling` with `num_envs` environments per seed."""
    from benchmarks.scaling import Size, config

    return config(Size(num_envs), "cpu")


def initial_states(num_envs: int, seeds: int) -> list[Any]:
    """Return the initial state of each seed."""
    from ecrl import init_state, rng

    return [init_state(config(num_envs), rng.key(seed)) for seed in range(seeds)]


def together(num_envs: int, seeds: int) -> Callable[[], int]:
    """Return a function that runs one iteration of all seeds as in `ecrl.train_many`, and returns the env steps."""
    from ecrl.loop.build import build
    from ecrl.loop.iteration import iterations_of_members
    from ecrl.run.train_many import fastest_calls

    cfg = config(num_envs).replace(**{"trainer.iterations": 10**6})
    run, states = build(cfg), initial_states(num_envs, seeds)
    most, threads = fastest_calls(run, cfg)
    size = (most or seeds) * threads
    groups = [states[start : start + size] for start in range(0, seeds, size)]

    def iterations() -> Iterator[None]:
        running = [
            iterations_of_members(run, group, cfg, [""] * len(group), runs_per_call=most or seeds, threads=threads)
            for group in groups
        ]
        while True:
            for group in running:
                next(group)
            yield

    return as_work(iterations(), seeds * num_envs * STEPS)


def in_turn(num_envs: int, seeds: int) -> Callable[[], int]:
    """Return a function that runs one iteration of each seed in sequence, and returns the environment steps."""
    from ecrl import make_iteration

    def iterations() -> Iterator[None]:
        states, iterate = initial_states(num_envs, seeds), make_iteration(config(num_envs))
        while True:
            states = [iterate(state)[0] for state in states]
            yield

    return as_work(iterations(), seeds * num_envs * STEPS)


def rejax(num_envs: int, seeds: int) -> Callable[[], int]:
    """Return a function that runs one iteration of all seeds of rejax in a jitted `jax.vmap`, and returns the steps."""
    import jax

    from benchmarks.other_libraries.rejax_ppo import ppo

    algorithm = ppo(num_envs)
    iterate = jax.jit(jax.vmap(algorithm.train_iteration))

    def iterations() -> Iterator[None]:
        states = jax.jit(jax.vmap(algorithm.init_state))(jax.random.split(jax.random.PRNGKey(0), seeds))
        while True:
            states = jax.block_until_ready(iterate(states))
            yield

    return as_work(iterations(), seeds * num_envs * STEPS)


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per number of cores and of environments."""
    sizes, core_sets = NUM_ENVS["quick" if quick else "full"], (cores[:2],) if quick else (cores[:1], cores[:2])
    out = []
    for used_cores in dict.fromkeys(map(tuple, core_sets)):
        for num_envs in sizes:
            args = {"num_envs": num_envs, "seeds": SEEDS}
            field = [Contestant(name, f"benchmarks.seeds:{name}", args) for name in CONTESTANTS]
            results = race(field, used_cores, rounds=3 if quick else 5, seconds=1.0)
            out.append({"seeds": SEEDS, "num_envs": num_envs, "cores": len(used_cores)} | result_row(num_envs, results))
    return out


def result_row(num_envs: int, results: Sequence[Result]) -> dict[str, Any]:
    """Return the rate of each contestant, and the time of "together" divided by the time of each other contestant.

    >>> some = [Result(name, [rate], 1.0, {}, 0.0) for name, rate in (("together", 4.0), ("in_turn", 2.0))]
    >>> result_row(4, some)["time_by_in_turn"], result_row(4, some)["met"]
    (0.5, True)
    """
    ours, *others = results
    out: dict[str, Any] = {f"{r.name}_steps_per_s": summary(r.rates)["median"] for r in results}
    if errors := [f"{r.name}: {r.error}" for r in results if r.error is not None]:
        return out | {"error": "; ".join(errors)}
    for other in others:
        by_round = summary(ratios(other, ours))
        out |= {f"time_by_{other.name}{kind}": by_round[key] for kind, key in (("", "median"), ("_max", "max"))}
    most = MOST[num_envs]
    met = all(out[f"time_by_{other.name}"] <= most[other.name] for other in others)
    return out | {f"most_by_{name}": target for name, target in most.items()} | {"met": met}


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot the environment steps per second of each contestant as bars, a group of bars per row."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if "time_by_in_turn" in row]
    picture = Figure(figsize=(6, 3), layout="constrained")
    axes = picture.subplots()
    for at, name in enumerate(CONTESTANTS):
        axes.bar(
            [i + 0.27 * at for i in range(len(measured))],
            [row[f"{name}_steps_per_s"] for row in measured],
            0.25,
            label=name,
        )
    axes.set_xticks(
        [i + 0.27 for i in range(len(measured))], [f"{r['num_envs']} envs\n{r['cores']} cores" for r in measured]
    )
    axes.set(ylabel="env steps per second", title=f"{SEEDS} seeds of PPO on CartPole")
    axes.legend()
    return picture
