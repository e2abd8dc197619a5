"""Subjects at tiny sizes, and equal work: all implementations of a kernel return the same numbers."""

import json

import numpy as np
import pytest
import torch
from support.camera_task import gl

pytest.importorskip("rlax", reason="the benchmarks' peers are not installed")

from benchmarks import (
    alternating_calls,
    cameras,
    end_to_end,
    gpu,
    gpu_traces,
    guard,
    kernels,
    memory,
    minatar,
    off_policy,
    phases,
    physics,
    recurrent,
    roofline,
    scaling,
    seeds,
    separate_process,
    solved,
)
from benchmarks.alternating_calls import ratio, time_alternating
from benchmarks.ecrl_runs import CONFIG
from benchmarks.implementations import adam, draws, gae, loss
from benchmarks.other_libraries import STEPS
from benchmarks.pairs import Failure, Result, available
from benchmarks.roofline import copy_rate, matmul_rate
from benchmarks.separate_process import run_in_process
from ecrl import init_state, load_config, make_env
from ecrl.kernels import gae as ecrl_gae
from ecrl.report.plots import write

EAGER = ["ecrl eager"]
COMPILED = [pytest.param("ecrl compiled", marks=pytest.mark.long)]


def results(module, name, *args, calls=1):
    """Return the result of an implementation after so many calls, as arrays of float64."""
    call = {**module.ECRL, **module.OTHERS}[name](module.inputs(*args), "cpu")
    for _ in range(calls):
        out = call()
    return [np.asarray(x, dtype=np.float64) for x in out]


def assert_equal_work(module, name, other, *args, calls=1, tol=1e-4):
    for actual, expected in zip(
        results(module, name, *args, calls=calls), results(module, other, *args, calls=calls), strict=True
    ):
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=tol, atol=tol)


@pytest.mark.ref
@pytest.mark.parametrize("name", [*EAGER, *COMPILED])
@pytest.mark.parametrize("other", gae.OTHERS)
def test_gae_is_the_same_in_every_library(name, other):
    pytest.importorskip({"rlax jitted": "rlax", "sb3 numpy": "stable_baselines3"}.get(other, "torchrl"))
    assert_equal_work(gae, name, other, 6, 40)


def test_gae_of_the_benchmark_is_the_equation():
    inputs = gae.inputs(3, 50)
    reward, value, done = (inputs[name].astype(np.float64) for name in ("reward", "value", "done"))
    assert 0 < done.mean() < 0.2
    trace, advantage = np.zeros(3), np.zeros((50, 3))
    for t in reversed(range(50)):
        delta = reward[t] + 0.99 * value[t + 1] * (1 - done[t]) - value[t]
        advantage[t] = trace = delta + 0.99 * 0.95 * (1 - done[t]) * trace
    actual = results(gae, "ecrl eager", 3, 50)
    np.testing.assert_allclose(actual[0], advantage, atol=1e-4)
    np.testing.assert_allclose(actual[1], advantage + value[:-1], atol=1e-4)


@pytest.mark.ref
@pytest.mark.parametrize("name", [*EAGER, *COMPILED])
@pytest.mark.parametrize("other", loss.OTHERS)
def test_loss_gradients_and_logs_are_the_same_in_every_library(name, other):
    assert_equal_work(loss, name, other, 500, tol=1e-5)
    assert 0.1 < results(loss, name, 500)[5] < 0.9  # of the ratios that are clipped: both branches count


@pytest.mark.ref
@pytest.mark.parametrize("variant", [*EAGER, *COMPILED])
@pytest.mark.parametrize("other", adam.OTHERS)
def test_adam_moves_the_weights_to_the_same_place_in_every_library(variant, other):
    pytest.importorskip("optax" if other == "optax jitted" else "torch")
    assert_equal_work(adam, variant, other, 8, calls=3, tol=1e-5)
    before = [x for name, x in sorted(adam.inputs(8).items()) if name.startswith("p_")]
    after = results(adam, variant, 8, calls=3)
    assert all(1e-3 < np.abs(a - b).max() < 4e-3 for a, b in zip(after, before, strict=True))  # three steps of 1e-3


@pytest.mark.ref
@pytest.mark.parametrize("kind", ["UNIFORM", "NORMAL"])
def test_draws_have_the_same_shape_and_moments_in_every_library_and_are_new_in_every_call(kind):
    ecrl, others = getattr(draws, kind)
    mean, deviation = (0.5, 12**-0.5) if kind == "UNIFORM" else (0.0, 1.0)
    for name, make in ({"ecrl eager": ecrl["ecrl eager"]} | others).items():
        call = make(draws.inputs(40_000), "cpu")
        first, second = (np.asarray(call()[0]) for _ in range(2))
        assert first.shape == (40_000,) and first.dtype == np.float32, name
        assert abs(first.mean() - mean) < 0.02 and abs(first.std() - deviation) < 0.02, name
        assert not np.array_equal(first, second), name


@pytest.mark.long
@pytest.mark.parametrize("kind", ["UNIFORM", "NORMAL"])
def test_compiled_draws_are_the_eager_ones(kind):
    ecrl, _ = getattr(draws, kind)
    eager, compiled = (ecrl[name](draws.inputs(1000), "cpu") for name in ("ecrl eager", "ecrl compiled"))
    for _ in range(2):
        torch.testing.assert_close(eager()[0], compiled()[0], rtol=0, atol=1e-5)


def test_costs_count_every_array_once():
    assert gae.cost(2, 3).bytes == 6 * 17
    assert loss.cost(10).bytes == 360
    weights = sum(x.size for name, x in adam.inputs(8).items() if name.startswith("p_"))
    assert weights == 2 * (4 * 8 + 8 + 8 * 8 + 8) + (2 + 1) * (8 + 1)
    assert adam.cost(8).bytes == 28 * weights
    assert draws.cost(10).bytes == 40


def test_every_case_has_implementations_and_every_target_a_case():
    for case in kernels.CASES:
        module, ecrl, others = kernels.implementations(case)
        assert {"ecrl compiled", "ecrl eager"} <= set(ecrl) <= set(kernels.WAYS) and others
        module.cost(*case.args)
    pairs = {
        (c.kernel, c.size, a, b)
        for c in kernels.CASES
        for _, o, p in [kernels.implementations(c)]
        for a in o
        for b in p
    }
    assert set(kernels.MUSTS) <= pairs
    assert all(c.quick for c in kernels.CASES if any(c.size == must[1] for must in kernels.MUSTS))


def fake_case(monkeypatch, **forms):
    """Replace case 0 by these implementations."""
    module = type("Fake", (), {"inputs": lambda *_: {}, "cost": lambda *_: gae.cost(4, 8)})
    ecrl = {name: make for name, make in forms.items() if name.startswith("ecrl")}
    others = {name: make for name, make in forms.items() if not name.startswith("ecrl")}
    monkeypatch.setattr(kernels, "implementations", lambda case: (module, ecrl, others))


def taking(seconds, monkeypatch):
    """Return an implementation whose call takes so many seconds by a fake clock. Other calls take half a second."""
    monkeypatch.setattr(alternating_calls, "seconds_per_call", lambda call, times: getattr(call, "seconds", 0.5))

    class Call:
        def __init__(self):
            self.seconds = seconds

        def __call__(self):
            return torch.ones(10).cos().sum()

    return lambda inputs, device: Call()


def test_a_kernel_row_has_the_ratio_the_target_and_the_roofline(monkeypatch):
    fake_case(monkeypatch, **{"ecrl eager": taking(0.001, monkeypatch), "sb3 numpy": taking(0.004, monkeypatch)})
    (row,) = kernels.measure(0, quick=True, device="cpu")
    assert (row["kernel"], row["size"], row["ours"], row["peer"]) == ("gae", "4096x128", "ecrl eager", "sb3 numpy")
    assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    assert row["ratio"] == pytest.approx(4.0) and row["met"] is True and row["must"] == pytest.approx(2 / 3)
    assert row["ours_us"] < row["peer_us"] and row["compile_s"] is None
    assert row["gb_s"] == pytest.approx(32 * 17 / row["ours_us"] / 1e3)
    roof = row["roof"]
    bound = max(row["gb_s"] / roof["copy_gb_s"], roof["gflop_s"] / roof["matmul_gflop_s"])
    assert row["roof_share"] == pytest.approx(bound) and bound > 0
    json.dumps(row)


def test_a_missed_target_is_reported(monkeypatch):
    fake_case(monkeypatch, **{"ecrl eager": taking(0.004, monkeypatch), "sb3 numpy": taking(0.001, monkeypatch)})
    (row,) = kernels.measure(0, quick=True, device="cpu")
    assert row["ratio"] == pytest.approx(0.25) and row["met"] is False


def test_an_implementation_that_compiles_too_long_misses_its_target(monkeypatch):
    taken = {"ecrl compiled": [1.0], "rlax jitted": [1.0]}
    for seconds, met in ((9.0, True), (11.0, False)):
        made = {"ecrl compiled": (None, seconds, None), "rlax jitted": (None, 1.0, None)}
        row = kernels.row(kernels.CASES[0], ("ecrl compiled", "rlax jitted"), made, taken)
        assert (row["met"], row["compile_s"]) == (met, seconds)


def test_a_failing_implementation_is_a_row_with_an_error(monkeypatch):
    def broken(inputs, device):
        raise ImportError("no such library\nsecond line")

    works = taking(0.001, monkeypatch)
    fake_case(monkeypatch, **{"ecrl eager": works, "broken": broken, "sb3 numpy": works})
    rows = {row["peer"]: row for row in kernels.measure(0, quick=True, device="cpu")}
    assert rows["broken"]["error"] == "broken: ImportError: no such library"
    assert "ratio" in rows["sb3 numpy"]


def test_turns_and_ratios_are_of_the_same_rounds():
    order = []
    taken = time_alternating({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, seconds=0.0)
    assert order == ["a"] * 3 + ["b"] * 3 + ["a", "b", "a", "b"]
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2}
    assert ratio([1.0, 1.0, 2.0], [2.0, 4.0, 2.0]) == {"ratio": 2.0, "ratio_min": 1.0, "ratio_max": 4.0}


def test_the_roof_is_bytes_and_operations_per_second(monkeypatch):
    monkeypatch.setattr(alternating_calls, "seconds_per_call", lambda call, times: call() or 0.5)
    assert copy_rate(1 << 20, "cpu") == (1 << 20) / 0.5
    assert matmul_rate("cpu") == 2 * roofline._SIDE["cpu"] ** 3 / 0.5


def test_a_separate_process_pins_before_imports_and_reports_errors():
    core = available()[-1]
    assert run_in_process("benchmarks.pairs:available", {}, [core]) == [core]
    assert run_in_process("os:getenv", {"key": "OMP_NUM_THREADS"}, [core]) == "1"
    assert run_in_process("os:getenv", {"key": "MINE"}, [core], {"MINE": "yes"}) == "yes"
    with pytest.raises(Failure, match="no_such"):
        run_in_process("benchmarks.no_such:thing", {}, [core])


def test_memory_slopes_leave_out_what_failed():
    measured = [{"num_envs": 2, "peak_mb": 4.0}, {"num_envs": 3, "error": "died"}, {"num_envs": 4, "peak_mb": 5.0}]
    rows = memory.with_slopes(measured)
    assert [row["bytes_per_step"] for row in rows] == [None, None, 2**20 / 256]


def test_memory_counts_what_the_second_unit_takes():
    """The first unit takes more memory and does not count; written pages count, also if they are freed.

    Separate processes, as in the benchmark: a large process reuses freed pages, which do not count.
    """
    small, large = (
        run_in_process(
            "benchmarks.memory:peak",
            {"make": "tests.support.fake_contestants:spending", "args": {"num_envs": size}},
            available(),
        )
        for size in (20, 50)
    )
    assert 25 < large["peak_mb"] - small["peak_mb"] < 35
    assert large["peak_mb"] < 60


def test_phases_are_leaves_and_what_they_leave():
    seconds = {("collect",): [0.3, 0.3], ("collect", "env"): [0.1, 0.2], ("collect", "policy"): [0.2], ("stat",): [0.1]}
    rows = phases.shares(seconds, 2.0)
    assert {row["phase"]: row["ms"] for row in rows} == pytest.approx(
        {"collect/env": 300.0, "collect/policy": 200.0, "stat": 100.0, "other": 1400.0}
    )
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)


@pytest.mark.long
def test_phases_of_a_small_run():
    rows = phases.profile(4, "cpu", 0.1)
    for form in ("as run", "taken apart"):
        part = {row["phase"]: row for row in rows if row["form"] == form}
        assert sum(row["share"] for row in part.values()) == pytest.approx(1.0)
        assert all(row["share"] >= 0.0 for row in part.values())
    assert {"collect/policy", "collect/env", "collect/critic", "update/learn"} <= {row["phase"] for row in rows}


def test_scaling_reports_both_libraries_and_the_ratio():
    result = scaling.Result
    both = scaling.result_row(
        [result("ecrl", [4.0, 6.0, 5.0], 1.0, {}, 0.0), result("rejax", [2.0, 6.0, 1.0], 2.0, {}, 0.0)]
    )
    assert (both["ecrl_steps_per_s"], both["rejax_steps_per_s"]) == (5.0, 2.0)
    assert (both["ratio_min"], both["ratio"], both["ratio_max"]) == (1.0, 2.0, 5.0)
    failed = scaling.result_row([result("ecrl", [4.0], 1.0, {}, 0.0), result("rejax", [], 2.0, {}, 0.0, "rejax: died")])
    assert failed["error"] == "rejax: died" and "ratio" not in failed


def test_scaling_changes_the_sizes_of_the_config_and_nothing_else():
    cfg = scaling.config(scaling.Size(8, 16, 32), "cpu")
    assert (cfg.trainer.num_envs, cfg.trainer.buffer_size, cfg.algorithm.cfg.batch_size) == (8, 16, 32)
    assert [cfg.policy.actor.network_cfg.hidden_sizes, cfg.policy.critic.network_cfg.hidden_sizes] == [(32, 32)] * 2
    base = load_config(CONFIG)
    assert scaling.config(scaling.Size(32), "cpu") == base.replace(
        **{"trainer.iterations": 10**6, "algorithm.cfg.batch_size": 1024}
    )


@pytest.mark.long
def test_scaling_at_a_tiny_size_has_rejax_beside():
    pytest.importorskip("rejax")
    row = scaling.point("width", scaling.Size(4, 8, 16), False, "cpu", available()[:1])
    assert row["ecrl_steps_per_s"] > 0 and row["rejax_steps_per_s"] > 0
    assert (row["num_envs"], row["steps"], row["width"]) == (4, 8, 16)


def test_without_a_gpu_its_rows_say_so(monkeypatch):
    monkeypatch.setattr(kernels, "run_in_process", lambda *_: [])
    monkeypatch.setattr(memory, "run_in_process", lambda *_: {"peak_mb": 1.0})
    monkeypatch.setattr(phases, "run_in_process", lambda *_: [])
    monkeypatch.setattr(scaling, "point", lambda *_: {"device": "cpu"})
    for module in (gpu, kernels, memory, phases, scaling):
        monkeypatch.setattr(module, "has_gpu", lambda: False)
        for quick in (True, False):
            gpu_rows = [row for row in module.rows(quick, [0]) if row.get("device") == "cuda"]
            assert gpu_rows and all(row["status"] == "not measured" for row in gpu_rows), module.__name__


def on_gpu(start, length, graph=0, kind="kernel", launch=1):
    about = {"graph id": graph, "correlation": launch}
    return {"ph": "X", "cat": kind, "ts": start, "dur": length, "args": about}


def test_shares_of_a_gpu_trace_count_what_overlaps_once():
    trace = [on_gpu(0, 4, 7), on_gpu(2, 4, 7), on_gpu(5, 3, 0, "gpu_memcpy"), on_gpu(50, 9, 1, "cpu_op")]
    assert gpu_traces.kernel_share(trace, 16.0) == {"busy_share": 0.5, "graph_share": 0.375}


def test_inside_a_graph_counts_what_lies_between_its_kernels_but_not_between_two_launches():
    trace = [on_gpu(0, 1, 7), on_gpu(3, 1, 7), on_gpu(6, 1, 7, launch=2), on_gpu(8, 1, 7, launch=2)]
    assert gpu_traces.kernel_share(trace, 10.0) == {"busy_share": 0.4, "graph_share": 0.7}
    copied_in_and_out = [on_gpu(4.5, 1, kind="gpu_memcpy"), on_gpu(9, 1)]
    assert gpu_traces.seconds_on_device([*trace, *copied_in_and_out], 2) == 3.5e-6  # only the graphs
    assert gpu_traces.seconds_on_device(copied_in_and_out, 2) == 1e-6


def test_rows_of_a_gpu_say_whether_they_are_what_must_be(monkeypatch):
    def point(by, size, quick, device, cores):
        return {"by": by, "device": device, **size._asdict(), "ecrl_steps_per_s": 300.0 * size.num_envs}

    monkeypatch.setattr(scaling, "has_gpu", lambda: True)
    monkeypatch.setattr(scaling, "point", point)
    monkeypatch.setattr(scaling, "run_in_process", lambda *_: {"busy_share": 0.9, "graph_share": 0.97})
    rows = scaling.on_gpu(False, [0])
    assert [row["num_envs"] for row in rows] == [512, 2048, 8192, 32_768, 65_536]
    assert [row["met"] for row in rows] == [True, True, True, True, False]  # 19.7 M env steps per second at the end
    monkeypatch.setattr(scaling, "run_in_process", lambda *_: {"busy_share": 0.9, "graph_share": 0.94})
    assert not any(row["met"] for row in scaling.on_gpu(False, [0]))


def test_kernels_of_a_gpu_are_judged_by_a_copys_bandwidth():
    assert gpu_traces.kernel_verdict("gae", "ecrl compiled", 0.71)["met"] is True
    assert gpu_traces.kernel_verdict("gae", "ecrl compiled", 0.69)["met"] is False
    assert gpu_traces.kernel_verdict("adam", "ecrl compiled", 0.1) == {"must": None, "met": None}


def test_a_difference_is_relative_and_nan_equals_only_nan():
    a = {"x": torch.tensor([1.0, float("nan"), float("inf")]), ("y", "z"): torch.tensor([3, 7]), "none": torch.ones(0)}
    b = a | {("y", "z"): torch.tensor([3, 9])}
    assert gpu.largest_difference(a, a) == {"difference": 0.0, "where": "", "must_below": 1e-4, "met": True}
    assert gpu.largest_difference(a, b) == {"difference": 0.25, "where": "y/z", "must_below": 1e-4, "met": False}
    c = a | {"x": torch.tensor([1.0, 2.0, float("inf")])}
    assert gpu.largest_difference(a, c)["difference"] == float("inf")


@pytest.mark.long
def test_a_config_that_takes_too_long_on_a_gpu_is_one_row(monkeypatch):
    fakes = {"quick": ("builtins:dict", {"difference": 0.0}), "slow": ("subprocess:run", {"args": ["sleep", "60"]})}
    monkeypatch.setattr(gpu, "CONFIGS", ("quick", "slow", "missing"))

    def begin(function, args, cores, env):
        assert function == "benchmarks.gpu:agreement" and args["device"] == "cuda" and env == gpu_traces.ENV["cuda"]
        return separate_process.begin(*fakes.get(args["config"], ("builtins:no_such_name", {})), cores, env)

    monkeypatch.setattr(gpu, "begin", begin)
    monkeypatch.setitem(gpu.LIMITS, "agreement", 10.0)
    rows = list(gpu.agreements("cuda", [0]))
    assert rows[0] == {"part": "agreement", "what": "quick", "difference": 0.0}
    assert rows[1]["error"] == "took longer than 10 s" and "died with status 1" in rows[2]["error"]


def test_rows_of_a_gpu_go_on_after_a_part_that_failed(monkeypatch, capsys):
    def failing(device, cores):
        yield {"part": "speed", "ratio": 2.0}
        raise Failure("benchmarks.gpu:speed: no answer for 150 s")

    parts = {"agreement": lambda device, cores: iter([{"part": "agreement", "difference": 0.0}]), "speed": failing}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    rows = gpu.rows(False, [0])
    assert [row["part"] for row in rows] == ["agreement", "speed", "speed"] and {row["device"] for row in rows} == {
        "cuda"
    }
    assert rows[1]["ratio"] == 2.0 and rows[2]["error"] == "benchmarks.gpu:speed: no answer for 150 s"
    assert capsys.readouterr().err.count("\n") == 3 and len(gpu.rows(True, [0])) == 1


def test_the_speed_on_a_gpu_is_met_only_with_all_its_targets(monkeypatch):
    monkeypatch.setattr(gpu, "run_in_process", lambda *_: {"busy_share": 0.98, "graph_share": 0.96})
    row = {"num_envs": 65_536, "ecrl_steps_s": 3e7, "ratio": 2.5, "must": 2.0, "met": True}
    fast = gpu.with_time_in_graphs(row, "cuda", [0])
    assert fast["met"] is True and fast["graph_share"] == 0.96
    assert gpu.with_time_in_graphs(row | {"ratio": 0.1, "met": False}, "cuda", [0])["met"] is False
    assert gpu.with_time_in_graphs(row | {"ecrl_steps_s": 1e7}, "cuda", [0])["met"] is False
    assert gpu.with_time_in_graphs({"error": "died"}, "cuda", [0]) == {"error": "died"}
    monkeypatch.setattr(gpu, "run_in_process", lambda *_: {"busy_share": 0.98, "graph_share": 0.9})
    assert gpu.with_time_in_graphs(row, "cuda", [0])["met"] is False


def test_the_limits_of_a_gpu_are_eight_minutes_together():
    limits = gpu.LIMITS
    assert sum(limits.values()) + (len(gpu.SIZES) - 1) * limits["time in graphs"] <= 8 * 60


@pytest.mark.long
def test_an_eager_and_a_compiled_run_agree():
    row = gpu.agreement("cartpole_ppo", "cpu")
    assert row["met"] and 0.0 <= row["difference"] < 1e-4 and row["compiled_s"] > 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_trace_distinguishes_a_copy_from_a_graph():
    assert 1e9 < gpu_traces.copy_rate(2**24) < 2e13
    rows = kernels.measure(0, True, "cuda")
    assert all(0 < row["roof_share"] < 1.5 for row in rows if row["ours"] == "ecrl compiled")
    assert all(row["must_roof_share"] == 0.7 for row in rows if row["ours"] == "ecrl compiled")


def small_push_cube(monkeypatch):
    sizes = {"trainer.num_envs": 3, "trainer.buffer_size": 8, "algorithm.cfg.batch_size": 24, "trainer.compile": "off"}
    small = physics.config(**sizes)
    monkeypatch.setattr(physics, "config", lambda robot=None, **keys: small.replace(**keys))


def test_bare_physics_takes_the_steps_of_a_rollout(monkeypatch):
    pytest.importorskip("mujoco.batch")
    small = physics.config().replace(
        **{"trainer.num_envs": 3, "trainer.buffer_size": 8, "algorithm.cfg.batch_size": 24}
    )
    monkeypatch.setattr(physics, "config", lambda robot=None, **keys: small.replace(**keys))
    again, states, substeps = physics.replay(2)
    passed = again()[:, substeps - 1 :: substeps]  # time, positions, velocities first, as in ecrl
    width = 1 + 13 + 12
    assert states.shape[:2] == (8, 3) and passed.shape[:2] == (3, 8)
    assert (passed[:, :-1, :width].swapaxes(0, 1) == states[1:, :, :width]).all()
    assert physics.bare(1)() == 24


@pytest.mark.slow
def test_environment_and_iterations_of_push_cube_work(monkeypatch):
    pytest.importorskip("mujoco.batch")
    small = physics.config().replace(
        **{"trainer.num_envs": 3, "trainer.buffer_size": 8, "algorithm.cfg.batch_size": 24}
    )
    small = small.replace(**{"trainer.compile": "off"})
    monkeypatch.setattr(physics, "config", lambda robot=None, **keys: small.replace(**keys))
    assert physics.environment()() == physics.iteration()() == 24


def test_a_row_of_push_cube_is_judged_by_bare_physics():
    bare = Result("mujoco.rollout", [10.0, 30.0, 20.0], 1.0, {}, 0.0)
    row = physics.result_row(Result("iteration", [5.0, 10.0, 10.0], 1.0, {}, 0.0), bare, 2)
    assert (row["times_bare"], row["times_min"], row["times_max"], row["met"]) == (2.0, 2.0, 3.0, False)
    assert physics.result_row(Result("iteration", [8.0, 20.0, 15.0], 1.0, {}, 0.0), bare, 2)["met"]
    assert not physics.result_row(Result("environment", [5.0, 10.0, 10.0], 1.0, {}, 0.0), bare, 2)["met"]
    assert "error" in physics.result_row(Result("environment", [], 1.0, {}, 0.0, "died"), bare, 2)


def test_the_cost_of_the_guard_is_the_median_of_rounds_with_its_interval():
    row = guard.cost([1.0 + i / 100 for i in range(101)], [1.0] * 101)
    assert (row["times"], row["quartile_1"], row["quartile_3"]) == pytest.approx((1.5, 1.25, 1.75))
    assert row["low"] == pytest.approx(1.40) and row["high"] == pytest.approx(1.60)  # ranks 41 and 61
    assert not row["met"] and guard.cost([1.0, 1.5, 1.01], [1.0] * 3)["met"]


@pytest.mark.parametrize(
    "env",
    [
        pytest.param("CartPole", marks=[pytest.mark.slow, pytest.mark.traced]),
        pytest.param("HalfCheetah", marks=pytest.mark.long),
    ],
)
def test_iterations_under_each_guard_take_turns(env, monkeypatch):
    monkeypatch.setattr(guard, "_TURN_S", 0.0)
    taken = guard.seconds_by_guard(env, 4, 2)
    assert {name: len(seconds) for name, seconds in taken.items()} == {"off": 2, "stop": 2, "skip": 2}
    guards = {guard.config(env, 4, **{"trainer.finite_guard": name}).trainer.finite_guard for name in taken}
    assert guards == {"off", "stop", "skip"} and guard.config(env, 4).trainer.num_envs == 4


def test_a_row_of_cameras_is_judged_by_the_fast_frames_of_one_core():
    fast, full = (
        Result("fast", [1400.0, 1600.0, 2000.0], 1.0, {}, 0.0),
        Result("full", [140.0, 200.0, 500.0], 1.0, {}, 0.0),
    )
    row = cameras.result_row("ReachRL", 1, fast, full, fast)
    assert (row["times_full"], row["times_min"], row["times_max"], row["met"]) == (8.0, 4.0, 10.0, True)
    assert cameras.result_row("ReachRL", 2, fast, full, fast)["met"] is None
    assert not cameras.result_row("ReachRL", 1, full, full, full)["met"]
    assert cameras.result_row("ReachRL", 1, fast, full._replace(rates=[], error="died"), fast)["error"] == "died"


@gl
def test_work_units_of_cameras_draw_and_step(monkeypatch):
    monkeypatch.setattr(cameras, "ENVS", 2)
    assert cameras.frames("ReachRL", "fast")() == cameras.frames("ReachRL", "full")() == 2
    work = cameras.steps("PushCubeRL")
    assert sum(work() for _ in range(33)) == 66  # more than one batch of noise


DRAWN = [
    cameras,
    end_to_end,
    gpu,
    guard,
    kernels,
    memory,
    minatar,
    off_policy,
    phases,
    physics,
    recurrent,
    scaling,
    seeds,
    solved,
]


@pytest.mark.parametrize("comparison", off_policy.comparisons(), ids=lambda c: f"{c.algorithm}-{c.contestants[0].name}")
def test_off_policy_contestants_learn_with_the_sizes_of_the_comparison(comparison):
    """Every contestant has the units, capacity, minibatch and number of updates that its row names."""
    for contestant in comparison.contestants:
        if contestant.make.startswith("benchmarks.off_policy"):
            cfg = off_policy.config(**contestant.args)
            assert cfg.trainer.iterations == 10**6 and cfg.algorithm.name == comparison.algorithm
            numbers = cfg.algorithm.cfg.model_dump()
            if comparison.algorithm in ("dqn", "td3", "sac"):
                assert [numbers[name] for name in ("batch_size", "capacity", "train_freq", "gradient_steps")] == [
                    256, contestant.args["capacity"], 1, 1
                ]  # fmt: skip
            assert (numbers.get("prioritized") is not None) == ("prioritized" in contestant.args["keys"])
            assert numbers.get("double", True) == contestant.args["keys"].get("double", True)
            assert [*cfg.policy.critic.network_cfg.hidden_sizes] == [comparison.units] * 2
        else:
            assert contestant.args["name"] == comparison.algorithm.removeprefix("fast_")
            assert contestant.args["units"] == comparison.units
    assert len(comparison.must_and_aim) == len(comparison.contestants) - 1


def test_recurrent_contestants_have_the_same_task_layers_and_minibatches():
    cfg = recurrent.config(8)
    assert (cfg.trainer.num_envs * cfg.trainer.buffer_size) // cfg.algorithm.cfg.batch_size == recurrent.MINIBATCHES
    assert cfg.algorithm.cfg.n_epochs == recurrent.EPOCHS
    state = init_state(cfg)
    weights = [tuple(x.shape) for x in state["params"].values(True, True) if x.ndim == 2]
    cell = [(64, 3 * 64), (64, 3 * 64)]
    assert sorted(weights) == sorted([(64, 2), *cell, (64, 64), (2, 64), (64, 64), (1, 64)])
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    from benchmarks.other_libraries import purejaxrl_recurrent

    runner, env, env_params = purejaxrl_recurrent.first_runner(8, 0)
    assert runner.obs.shape == (8, len(recurrent.OBSERVED))
    theirs = [x.shape for x in jax.tree.leaves(runner.train.params) if x.ndim == 2]
    assert sum(a * b for a, b in theirs) == sum(a * b for a, b in weights)
    after, rollout = purejaxrl_recurrent.iteration(runner, env, env_params)
    assert int(after.train.step) == recurrent.EPOCHS * recurrent.MINIBATCHES
    assert rollout.obs.shape == (STEPS, 8, 2) and np.asarray(rollout.done).any()


@pytest.mark.ref
def test_the_recurrent_peer_recomputes_its_rollout():
    """The memory restarts in the rollout and in the update at the same steps: the first update has the ratio 1."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    from benchmarks.other_libraries import purejaxrl_recurrent as peer

    runner, env, env_params = peer.first_runner(8, 0)
    iterate = jax.jit(lambda runner: peer.iteration(runner, env, env_params))
    for _ in range(2):
        before = runner
        runner, rollout = iterate(before)
        seen = (rollout.obs, rollout.start)
        _, logits, value = before.train.apply_fn(before.train.params, before.memory, seen)
        np.testing.assert_allclose(value, rollout.value, atol=1e-5)
        np.testing.assert_allclose(peer.log_prob_of(logits, rollout.action), rollout.log_prob, atol=1e-5)
        assert np.asarray(rollout.done).sum() > 8 and (rollout.start[1:] == rollout.done[:-1]).all()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of gymnax's games
@pytest.mark.parametrize("kind", minatar.NETWORKS)
@pytest.mark.parametrize("game", minatar.GAMES)
def test_contestants_of_minatar_have_the_same_layers_and_minibatches(game, kind):
    cfg = minatar.config(game, kind)
    assert cfg.trainer.num_envs * STEPS // cfg.algorithm.cfg.batch_size == minatar.SIZES.minibatches
    weights = [x.numel() for x in init_state(cfg)["params"].values(True, True) if x.ndim > 1]
    jax = pytest.importorskip("jax")
    pytest.importorskip("rejax")
    from benchmarks.other_libraries import rejax_minatar

    algorithm = rejax_minatar.ppo(game, kind)
    state = algorithm.init_state(jax.random.PRNGKey(0))
    leaves = jax.tree.leaves((state.actor_ts.params, state.critic_ts.params))
    assert sorted(x.size for x in leaves if x.ndim > 1) == sorted(weights)
    shape = algorithm.env.observation_space(algorithm.env_params).shape
    assert shape == make_env(cfg.env).observation_space.shape


@pytest.mark.ref
def test_advantages_of_the_recurrent_peer_are_those_of_ecrl():
    pytest.importorskip("flax")
    from benchmarks.other_libraries import purejaxrl_recurrent as peer

    draw = np.random.default_rng(0)
    value, reward = draw.normal(size=(10, 3)), draw.normal(size=(9, 3))
    done = draw.random((9, 3)) < 0.3
    actual = peer.gae(peer.Transition(None, None, None, None, value[:-1], reward, done), value[-1])
    columns = [torch.from_numpy(x.T.copy()) for x in (reward, value[:-1], value[1:], done, done)]
    for ours, theirs in zip(ecrl_gae(*columns, gamma=peer.GAMMA, gae_lambda=peer.LAMBDA), actual, strict=True):
        np.testing.assert_allclose(np.asarray(theirs), ours.numpy().T, atol=1e-5)


@pytest.mark.parametrize("module", DRAWN, ids=lambda m: m.__name__)
def test_figures_of_rows_with_gaps(module, tmp_path):
    pytest.importorskip("matplotlib")
    full = {
        end_to_end: {"peer": "sb3", "num_envs": 4, "cores": 1, "ratio": 2.0, "ratio_min": 1.0, "ratio_max": 3.0}
        | {"must": 1.0},
        guard: {
            "env": "CartPole",
            "num_envs": 4,
            "guard": "stop",
            "times": 1.01,
            "quartile_1": 1.0,
            "quartile_3": 1.02,
        },
        kernels: {"kernel": "gae", "size": "1x1", "ours": "ecrl eager", "peer": "sb3", "ratio": 2.0, "ratio_min": 1.0}
        | {"ratio_max": 3.0},
        memory: {"contestant": "ecrl", "num_envs": 4, "peak_mb": 3.0},
        off_policy: {"algorithm": "sac", "units": 64, "ours": "ecrl", "peer": "SB3", "ratio": 2.0, "must": 1.0},
        physics: {"what": "iteration", "times_bare": 1.5},
        minatar: {"game": "breakout", "network": "cnn", "ratio": 2.0, "ratio_min": 1.0, "ratio_max": 3.0},
        recurrent: {"num_envs": 64, "ratio": 2.0, "ratio_min": 1.0, "ratio_max": 3.0},
        cameras: {"task": "ReachRL", "cores": 1, "fast_frames_per_s": 9.0, "full_frames_per_s": 3.0, "times_full": 3.0},
        phases: {"num_envs": 4, "form": "as run", "phase": "collect", "share": 0.5, "ms": 1.0},
        scaling: {"by": "width", "num_envs": 4, "steps": 8, "width": 16, "ecrl_steps_per_s": 5.0},
        seeds: {"num_envs": 4, "cores": 1, "time_by_in_turn": 0.5}
        | {f"{name}_steps_per_s": 5.0 for name in seeds.CONTESTANTS},
        gpu: {"what": "gae", "peer": "rlax", "ratio": 2.0, "ratio_min": 1.0, "ratio_max": 3.0, "ours": "ecrl compiled"},
        solved: {"what": "cold", "ours": "ecrl", "peer": "rejax", "ratio": 0.5, "ours_s": 1.0, "peer_s": 2.0},
    }[module] | {"device": "cpu"}
    gap = gpu_traces.not_measured(
        **{key: full[key] for key in ("by", "contestant", "num_envs", "kernel", "size") if key in full}
    )
    made = module.figure([full, {**gap, "device": "cuda"}, {**gap, "device": "cpu", "error": "died"}])
    assert all(axes.has_data() for axes in made.axes)
    assert all(path.stat().st_size > 1000 for path in write(made, tmp_path / "drawn"))


@pytest.mark.long
def test_many_seeds_race_in_one_call_and_in_sequence(monkeypatch):
    monkeypatch.setattr(seeds, "SEEDS", 2)
    monkeypatch.setattr(seeds, "CONTESTANTS", ("together", "in_turn"))
    real, rates = seeds.race, {"together": [4.0], "in_turn": [2.0]}

    def fixed_rates(*args, **kwargs):
        results = real(*args, **kwargs)
        assert all(rate > 0 for result in results for rate in result.rates)
        return [result._replace(rates=rates[result.name] if result.rates else []) for result in results]

    monkeypatch.setattr(seeds, "race", fixed_rates)
    (row,) = seeds.rows(True, available()[:1])
    assert "error" not in row, row
    assert (row["seeds"], row["num_envs"], row["most_by_in_turn"], row["most_by_rejax"]) == (2, 4, 0.5, 0.8)
    assert (row["time_by_in_turn"], row["met"]) == (0.5, True)
