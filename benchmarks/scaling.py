"""Measure environment steps per second by number of environments, length of a rollout and width of both networks.

A full run also measures rejax. A quick run measures only ecrl, at sizes that `end_to_end` has compiled before. On a
GPU, the number of environments goes up to 65,536, and the rows have the share of time inside CUDA graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu_traces import ENV, has_gpu, not_measured, run_verdict
from benchmarks.other_libraries import STEPS, as_work
from benchmarks.pairs import Contestant, Failure, Result, race, ratio_summary, ratios, summary
from benchmarks.separate_process import run_in_process


class Size(NamedTuple):
    """The sizes that vary between rows."""

    num_envs: int
    steps: int = STEPS
    width: int = 64


BASE = Size(64)
BY = {
    "num_envs": [Size(n) for n in (4, 16, 64, 256, 1024, 4096)],
    "steps": [BASE._replace(steps=t) for t in (32, 128, 512, 1024)],
    "width": [Size(n, width=w) for n in (64, 512) for w in (64, 128, 256, 512)],
}
QUICK = {"num_envs": [Size(64), Size(512)]}
GPU = {"num_envs": [Size(n) for n in (512, 2048, 8192, 32_768, 65_536)]}


def config(size: Size, device: str) -> Any:
    """Return the config of `ecrl_runs` with other sizes, on a device."""
    from benchmarks.ecrl_runs import CONFIG
    from ecrl import load_config

    keys: dict[str, Any] = {
        "trainer.num_envs": size.num_envs,
        "trainer.buffer_size": size.steps,
        "trainer.iterations": 10**6,
        "trainer.device": device,
        "algorithm.cfg.batch_size": size.num_envs * size.steps // 4,
    }
    widths = {f"policy.{net}.network_cfg.hidden_sizes": [size.width] * 2 for net in ("actor", "critic")}
    return load_config(CONFIG).replace(**keys, **widths)


def ecrl_work(num_envs: int, steps: int, width: int, device: str = "cpu") -> Callable[[], int]:
    """Return a function that runs one iteration of ecrl, and returns its number of environment steps."""
    from benchmarks.ecrl_runs import averages

    return as_work(averages(config(Size(num_envs, steps, width), device)), num_envs * steps)


def rejax(num_envs: int, steps: int, width: int) -> Callable[[], int]:
    """Return a function that runs several iterations of rejax in one compiled call, and returns the number of steps."""
    import jax

    from benchmarks.other_libraries.rejax_ppo import ppo

    kwargs = {"activation": "tanh", "hidden_layer_sizes": (width, width)}
    algorithm, times = ppo(num_envs, num_steps=steps, agent_kwargs=kwargs), max(1, 25_600 // (num_envs * steps))
    iterate = jax.jit(lambda state: jax.lax.fori_loop(0, times, lambda _, s: algorithm.train_iteration(s), state))

    def iterations() -> Iterator[None]:
        state = algorithm.init_state(jax.random.PRNGKey(0))
        while True:
            state = jax.block_until_ready(iterate(state))
            yield

    return as_work(iterations(), times * num_envs * steps)


def point(by: str, size: Size, quick: bool, device: str, cores: Sequence[int]) -> dict[str, Any]:
    """Measure one size with ecrl, and also with rejax unless `quick` is True. Return the row."""
    args, env = size._asdict(), ENV[device]
    contestants = [Contestant("ecrl", "benchmarks.scaling:ecrl_work", {**args, "device": device}, env)]
    if not quick:
        contestants.append(Contestant("rejax", "benchmarks.scaling:rejax", args, env))
    results = race(contestants, cores, rounds=3 if quick else 5, seconds=0.5 if quick else 1.0)
    return {"by": by, "device": device, **args} | result_row(results)


def result_row(results: Sequence[Result]) -> dict[str, Any]:
    """Return the steps per second of each result, and the ratio over the rounds if there are two results.

    >>> result_row([Result("ecrl", [4.0], 1.0, {}, 0.0), Result("rejax", [2.0], 1.0, {}, 0.0)])["ratio"]
    2.0
    """
    errors = [r.error for r in results if r.error is not None]
    out: dict[str, Any] = {f"{r.name}_steps_per_s": summary(r.rates)["median"] for r in results}
    out |= {f"{r.name}_setup_s": r.setup_s for r in results if r.error is None}
    if errors:
        return out | {"error": "; ".join(errors)}
    if len(results) == 2:
        out |= ratio_summary(ratios(*results))
    return out


def on_gpu(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of a GPU, with the share of time that the GPU is busy, and the share inside CUDA graphs."""
    if not has_gpu():
        return [not_measured(by=by, device="cuda", **size._asdict()) for by, sizes in GPU.items() for size in sizes]
    out = []
    for by, sizes in GPU.items():
        for size in sizes:
            row = point(by, size, quick, "cuda", cores)
            args = {"make": "benchmarks.scaling:ecrl_work", "args": {**size._asdict(), "device": "cuda"}}
            try:
                row |= run_in_process("benchmarks.gpu_traces:profiled_share", args, cores, ENV["cuda"])
                row |= run_verdict(row)
            except Failure as failure:
                row["error"] = str(failure)
            out.append(row)
    return out


def rows(quick: bool, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per size on the first core, then the rows of a GPU. Without a GPU, the latter are not measured."""
    sizes = QUICK if quick else BY
    out = [point(by, size, quick, "cpu", cores[:1]) for by, some in sizes.items() for size in some]
    return out + on_gpu(quick, cores)


def figure(rows: list[dict[str, Any]]) -> Any:
    """Plot steps per second of ecrl and rejax. A panel has a varying size and, for widths, a number of environments."""
    from matplotlib.figure import Figure

    def kind(row: dict[str, Any]) -> tuple[str, str, int]:
        return row["by"], row["device"], row["num_envs"] if row["by"] == "width" else 0

    measured = [r for r in rows if r.get("ecrl_steps_per_s")]
    kinds = sorted({kind(r) for r in measured})
    panels = max(1, len(kinds))
    picture = Figure(figsize=(4 * panels, 3.5), layout="constrained")
    all_axes = picture.subplots(1, panels, squeeze=False)
    for axes, (by, device, num_envs) in zip(all_axes[0], kinds, strict=False):
        for name in ("ecrl", "rejax"):
            line = [r for r in measured if kind(r) == (by, device, num_envs) and r.get(f"{name}_steps_per_s")]
            axes.plot([r[by] for r in line], [r[f"{name}_steps_per_s"] for r in line], marker="o", label=name)
        label = f"{by} ({device}, {num_envs} envs)" if num_envs else f"{by} ({device})"
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="env steps per second")
        axes.legend()
    return picture
