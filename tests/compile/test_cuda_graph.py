"""Captured functions: equal to eager, pure, captured once. Capturing needs a GPU; a stand-in follows its memory rules.

The stand-in runs a function once in fixed memory. Each replay runs it again there and overwrites the earlier results.
"""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checks import close
from support.long_cases import long_except
from support.small_runs import small
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ecrl
from ecrl import rng
from ecrl.compile import jit as compile
from ecrl.compile.cuda_graph import compile_segment, compiled
from ecrl.compile.jit import choose_form
from ecrl.errors import ConfigError
from ecrl.kernels import gae
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.pytree import Borrowed, flatten, mapped

CONFIGS = Path(__file__).parents[2] / "configs"
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GROUPS = {
    "env": {"name": "pendulum"},  # whose rewards differ from the first step on
    "algorithm": {"name": "grpo", "cfg": {"n_epochs": 2, "batch_size": 10, "group_size": 2}},
}


def as_it_is(graph, inputs):
    return graph


class Replayer:
    """Stand-in for CUDA graphs that counts captures."""

    def __init__(self):
        self.captured = 0

    def __call__(self, run, inputs):
        self.captured += 1
        self.without_data(run, inputs)
        outputs = [leaf.clone() for leaf in run(*inputs)]

        def replay():
            for leaf, new in zip(outputs, run(*inputs), strict=True):
                leaf.copy_(new)

        return replay, outputs

    @staticmethod
    def without_data(run, inputs):
        """Run on fake tensors, as a capture only records operations; reading a value on the host fails."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            run(*map(mode.from_tensor, inputs))


@pytest.fixture(scope="module", params=["as it is", pytest.param("inductor", marks=pytest.mark.long)])
def replayer(request):
    """Cut every compiled function into pieces and capture it with the stand-in."""
    made = Replayer()
    make = partial(compiled, capture=made, compile=as_it_is)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "inductor":  # its code is for tensors with data
            make = partial(compiled, capture=made, compile=compile_segment)
            patch.setattr(Replayer, "without_data", staticmethod(lambda run, inputs: None))
        patch.setattr(compile, "_compiler_for", lambda leaves: make)
        compile._compiled.cache_clear()
        yield made
    compile._compiled.cache_clear()


def config(algorithm, **changes):
    made = small(**changes)
    if algorithm == "ppo":
        return made
    raw = made.model_dump(mode="json", exclude_unset=True) | GROUPS
    return ecrl.config.config_from_dict(raw)


def assert_close(a, b):
    (a, like), (b, expected) = flatten(a), flatten(b)
    assert like == expected
    for actual, expected_leaf in zip(a, b, strict=True):
        close(actual, expected_leaf)


@pytest.mark.parametrize("algorithm", long_except(["ppo"], ["ppo", "grpo"]))
def test_iterations_agree_with_eager_for_any_seed_and_rate_after_one_capture(replayer, algorithm):
    eager = config(algorithm)
    cfg = eager.replace(**{"trainer.compile": "on"})
    iteration, plain = make_iteration(cfg), make_iteration(eager)
    captured, before = [], replayer.captured
    for seed, rate in ((1, 3e-3), (2, 1e-2)):
        state = init_state(eager.replace(**{"trainer.seed": seed})).clone()
        state["hyper", "learning_rate"] = torch.tensor(rate)
        expected = state
        for _ in range(2):
            (state, logs), (expected, expected_logs) = iteration(state), plain(expected)
            assert_close((state, logs), (expected, expected_logs))
            assert logs["train"]["grad_norm"] > 1e-3
        captured.append(replayer.captured)
    assert before < captured[0] == captured[1]


def _read(x, borrowed):
    return x + borrowed.fields["ring"][:2]


def test_a_borrowed_tensor_is_read_in_place_and_another_address_captures_again(replayer):
    """The graph holds its address: nothing is copied, and what is written there is seen by the next replay."""
    ring, addresses = torch.arange(8.0), []
    fn, before = choose_form("on", "cpu").jit(_read), replayer.captured
    call = replayer.__class__.__call__

    def noting(self, run, tensors):
        addresses.append([x.data_ptr() for x in tensors])
        return call(self, run, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayer.__class__, "__call__", noting)
        borrowed = Borrowed(TensorDict({"ring": ring}, []))
        assert fn(torch.ones(2), borrowed).tolist() == [1.0, 2.0]
        ring.add_(10.0)
        assert fn(torch.zeros(2), borrowed).tolist() == [10.0, 11.0]
        assert replayer.captured == before + 1 and ring.data_ptr() in addresses[0]
        other = Borrowed(TensorDict({"ring": torch.full((8,), 5.0)}, []))
        assert fn(torch.ones(2), other).tolist() == [6.0, 6.0]
        assert replayer.captured == before + 2 and other.fields["ring"].data_ptr() in addresses[1]


SHIPPED = ["cartpole_ppo", "cartpole_grpo", "pendulum_ppo", "point_mass_ppo", "point_mass_apg"]
ON_HOST = "mountain_car_continuous_ppo"  # Gymnasium's: the functions around the host's steps are captured one by one


@pytest.mark.slow
@pytest.mark.parametrize("replayer", ["as it is"], indirect=True)
@pytest.mark.parametrize("name", long_except([ON_HOST], [ON_HOST, *SHIPPED]))
def test_shipped_configs_agree_with_eager(replayer, name):
    sizes = {"trainer.num_envs": 8, "trainer.buffer_size": 6, "trainer.compile": "off"}
    batch = {} if name.endswith("apg") else {"algorithm.cfg.batch_size": 20}  # the third one of a pass is padded
    eager = ecrl.load_config(CONFIGS / f"{name}.json").replace(**sizes, **batch)
    iteration, plain = make_iteration(eager.replace(**{"trainer.compile": "on"})), make_iteration(eager)
    state, expected = init_state(eager), init_state(eager)
    captured = []
    for _ in range(2):
        (state, logs), (expected, expected_logs) = iteration(state), plain(expected)
        assert_close((_without_token(state), logs), (_without_token(expected), expected_logs))
        captured.append(replayer.captured)
    assert captured[0] == captured[1]
    for one in (state, expected):
        ecrl.close(one, eager)


def _without_token(state):
    return state.copy().set("env", state["env"].exclude("token"))


def test_inputs_and_outputs_never_change_later(replayer):
    cfg = small(**{"trainer.compile": "on"})
    iteration, state = make_iteration(cfg), init_state(cfg)
    before, results = mapped(torch.clone, state), []
    for _ in range(3):
        state, logs = iteration(state)
        results.append(((state, logs), mapped(torch.clone, (state, logs))))
    for now, then in results:
        assert_close(now, then)
    assert_close(init_state(cfg), before)


def test_outputs_may_be_written_to(replayer):
    cfg = small(**{"trainer.compile": "on"})
    iteration, state = make_iteration(cfg), init_state(cfg).clone()
    first, _ = iteration(state)
    copies = mapped(torch.clone, first)
    for leaf in flatten((first, state))[0]:
        leaf.zero_()
    again, _ = iteration(init_state(cfg))
    assert_close(again, copies)


@pytest.mark.long
def test_an_evaluation_in_between_captures_nothing_again(replayer):
    cfg = small(**{"trainer.compile": "on", "trainer.iterations": 3})
    counts = [replayer.captured]
    for record in train_iter(init_state(cfg), cfg):
        if record["log_type"] == "train":
            ecrl.evaluate(record["state"], cfg, num_episodes=2)
            counts.append(replayer.captured)
    assert counts[0] + 2 <= counts[1] == counts[-1]


def _product(x):
    return x @ x


def test_another_precision_of_products_is_captured_apart(replayer):
    jit = compile.choose_form("on", "cpu").jit
    before, captured = torch.get_float32_matmul_precision(), replayer.captured
    try:
        for precision in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(precision)
            close(jit(_product)(torch.eye(3)), torch.eye(3))
    finally:
        torch.set_float32_matmul_precision(before)
    assert replayer.captured == captured + 2


def test_a_gpu_without_triton_or_a_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(compile, "has_triton", lambda: False)
    try:
        compile.gpu_fault.cache_clear()
        with pytest.raises(ConfigError, match="on, but Triton is not installed; install triton, gcc"):
            compile._form_for.__wrapped__("on", "cuda")
        monkeypatch.setattr(compile, "has_triton", lambda: True)
        monkeypatch.setenv("PATH", "/nonexistent")
        monkeypatch.delenv("CC", raising=False)
        compile.gpu_fault.cache_clear()
        with pytest.warns(RuntimeWarning, match="running eager.*no C compiler found"):
            assert compile._form_for.__wrapped__("auto", "cuda").name == "eager"
        monkeypatch.setenv("CC", "cc")
        compile.gpu_fault.cache_clear()
        form = compile._form_for.__wrapped__("auto", "cuda")
        assert (form.name, form.reason) == (
            "compiled",
            "rollout and update compiled by inductor for cuda and captured in CUDA graphs",
        )
    finally:
        compile.gpu_fault.cache_clear()


WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
WAITS |= {"aten::_unique2", "aten::unique_dim", "aten::repeat_interleave.Tensor"}
READS = {"cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__array__"}
SENDS = {torch.tensor, torch.as_tensor, torch.from_numpy}


class Waits(TorchDispatchMode):
    """Record operations that make the host wait for the device, because a size or a branch depends on data."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func.name() in WAITS or masks:
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Notes what is fetched to the host or sent from it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in READS or func in SENDS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("guard", "waited", "read"), [("off", [], set()), ("stop", ["aten::_local_scalar_dense"], {"__bool__"})]
)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_an_iteration_waits_for_a_device_once_at_most(algorithm, guard, waited, read):
    """For the flags of the finite guard."""
    cfg = config(algorithm).replace(**{"trainer.finite_guard": guard})
    records = train_iter(init_state(cfg), cfg)
    next(records), next(records)
    with Waits() as waits, Reads() as reads:
        next(records), next(records)
    assert waits.seen == waited
    assert READS & set(reads.seen) == read


def test_the_checks_of_waiting_find_it():
    x = torch.arange(3.0)
    with Waits() as waits, Reads() as reads:
        x[x > 1.0], float(x[0]), x.cpu(), x.nonzero(), torch.tensor([1.0])
    assert {"aten::_local_scalar_dense", "aten::nonzero", "aten::index.Tensor"} <= set(waits.seen)
    assert {"__float__", "cpu", "tensor"} <= set(reads.seen)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_an_iteration_makes_its_tensors_where_its_state_is(algorithm):
    """With another default device, a tensor made without a device does not fit the others."""
    cfg = config(algorithm)
    state, iteration = init_state(cfg), make_iteration(cfg)
    expected, _ = iteration(state)
    with torch.device("meta"):
        after, logs = iteration(state)
    assert_close(after, expected)
    assert {leaf.device.type for leaf in flatten(logs)[0]} == {"cpu"}


@cuda
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_on_a_gpu_captured_iterations_agree_with_eager(algorithm):
    eager = config(algorithm, **{"trainer.device": "cuda"})
    runs: list = []
    iteration = make_iteration(eager.replace(**{"trainer.compile": "on"}), lambda run: runs.append(run) or run)
    plain, compiled_once = make_iteration(eager), 0
    for seed in (1, 2):
        state = expected = init_state(eager.replace(**{"trainer.seed": seed}))
        states = []
        for _ in range(3):
            (state, _), (expected, _) = iteration(state), plain(expected)
            states.append((state, mapped(torch.clone, state)))
            assert_close(state, expected)
        for now, then in states:
            assert_close(now, then)
        if seed == 1:
            compiled_once = len(runs[0].jit.compilations)
    assert len(runs[0].jit.compilations) == compiled_once


@cuda
def test_on_a_gpu_an_iteration_synchronises_at_most_once():
    cfg = small(**{"trainer.device": "cuda", "trainer.compile": "on"})
    records = train_iter(init_state(cfg), cfg)
    for _ in range(4):
        next(records)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            next(records), next(records)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchronizing" in str(w.message)]
    assert len(waits) <= 1, waits


@cuda
def test_on_a_gpu_a_number_set_on_the_host_is_taken_along():
    cfg = small(**{"trainer.device": "cuda", "trainer.compile": "on"})
    state = init_state(cfg).clone()
    there, _ = make_iteration(cfg)(state)
    state["hyper"] = TensorDict({**state["hyper"], "learning_rate": state["hyper", "learning_rate"].cpu()}, [])
    here, _ = make_iteration(cfg)(state)
    assert_close(here, there)


@cuda
@pytest.mark.parametrize(("rows", "time"), [(1, 2048), (64, 1024), (4096, 128), (65_536, 16), (33, 5)])
def test_on_a_gpu_gae_is_that_of_the_cpu(rows, time):
    keys = rng.split(rng.key(0), 3)
    reward, value = (rng.normal(key, (rows, time)) for key in keys[:2])
    done = rng.uniform(keys[2], (rows, time)) < 0.02
    inputs = reward, value, value.roll(-1, 1), done, done
    for dtype, tol in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        args = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        expected = gae(*[x.double() if x.is_floating_point() else x for x in inputs], gamma=0.99, gae_lambda=0.95)
        actual = gae(*[x.cuda() for x in args], gamma=0.99, gae_lambda=0.95)
        for a, b in zip(actual, expected, strict=True):
            close(a.cpu(), b, tol)
