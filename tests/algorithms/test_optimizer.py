"""Learning rates: the numbers of a state, schedules by hand, the adaptive rate and what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close
from tensordict import TensorDict

from ecrl.algorithms.optimizer import (
    Group,
    GroupSettings,
    clip_gradients,
    groups_of,
    hyper_tensors,
    layout_of,
    learning_rates,
    learning_state,
    optimizer_init,
    optimizer_step,
    pack,
    pack_opt,
    unpack,
)
from ecrl.algorithms.optimizer_config import (
    LearningConfig,
    OptimizerConfig,
    OptimizerKwargs,
    SchedulerConfig,
    optimizer_of,
)
from ecrl.algorithms.schedules import adapted_rate
from ecrl.errors import ConfigError

CPU = torch.device("cpu")
PARAMS = TensorDict({"w": torch.zeros(2)}, [])


def learning(**cfg) -> LearningConfig:
    return LearningConfig.model_validate(cfg)


def made(cfg: LearningConfig, **numbers) -> dict:
    return learning_state(cfg, PARAMS, numbers, CPU)


def test_the_numbers_of_a_state():
    cfg = learning(optimizer={"name": "adamw", "learning_rate": 0.25, "kwargs": {"betas": [0.5, 0.75]}})
    state = made(cfg, gamma=0.5, target_kl=None)
    assert set(state) == {"params", "opt", "hyper"}
    assert set(state["hyper"].keys()) == {"gamma", "learning_rate", "max_grad_norm", "optimizer"}
    expected = {"beta1": 0.5, "beta2": 0.75, "eps": 1e-8, "weight_decay": 0.01}
    assert set(state["hyper"]["optimizer"].keys()) == set(expected)
    for name, value in expected.items():
        close(state["hyper"]["optimizer"][name], value)
    assert all(x.ndim == 0 and x.dtype == torch.float32 for x in state["hyper"].values(True, True))
    assert set(state["opt"].keys()) == {"mu", "nu", "step"}


VARIANTS = [
    ("adam", {"weight_decay": 0.25}, "adam", {"beta1", "beta2", "eps", "weight_decay"}, {"mu", "nu"}),
    ("adam", {"amsgrad": True}, "amsgrad", {"beta1", "beta2", "eps"}, {"mu", "nu", "max_nu"}),
    ("adamw", {"amsgrad": True}, "amsgradw", {"beta1", "beta2", "eps", "weight_decay"}, {"mu", "nu", "max_nu"}),
    ("sgd", {"momentum": 0.5, "nesterov": True}, "nesterov_sgd", {"momentum"}, {"momentum"}),
    ("sgd", {"weight_decay": 0.25}, "sgd", {"momentum", "weight_decay"}, {"momentum"}),
    ("rmsprop", {"centered": True}, "centered_rmsprop", {"alpha", "eps"}, {"mu", "nu"}),
    ("adam", {}, "adam", {"beta1", "beta2", "eps"}, {"mu", "nu"}),
    ("sgd", {}, "sgd", {"momentum"}, {"momentum"}),
    ("rmsprop", {}, "rmsprop", {"alpha", "eps"}, {"nu"}),
]


@pytest.mark.parametrize(("name", "kwargs", "kernel", "numbers", "slots"), VARIANTS)
def test_a_state_has_the_leaves_of_its_variant_only(name, kwargs, kernel, numbers, slots):
    cfg = learning(optimizer={"name": name, "kwargs": kwargs})
    state = made(cfg)
    assert set(state["hyper"]["optimizer"].keys()) == numbers
    assert set(state["opt"].keys()) == slots | {"step"}
    assert groups_of(cfg)[0].optimizer == kernel
    assert learning(**cfg.to_dict()) == cfg


@pytest.mark.parametrize(
    "kwargs", [{}, {"kwargs": {}}, {"kwargs": {"weight_decay": None}}, {"kwargs": OptimizerKwargs()}]
)
def test_adamw_decays_by_a_hundredth_unless_the_config_sets_another_decay(kwargs):
    assert OptimizerConfig(name="adamw", **kwargs).kwargs.weight_decay == 0.01
    assert OptimizerConfig(name="adam", **kwargs).kwargs.weight_decay is None
    cfg = learning(optimizer={"name": "AdamW", "kwargs": {"weight_decay": 0.5}})
    assert cfg.optimizer.kwargs.weight_decay == 0.5
    assert cfg.replace(**{"optimizer.name": "adam"}).optimizer.kwargs.weight_decay is None


@pytest.mark.parametrize(
    ("cfg", "name", "rate"),
    [
        ({}, "adam", 3e-4),
        ({"learning_rate": 0.5}, "adam", 0.5),
        ({"optimizer": {"name": "sgd", "learning_rate": 0.25}}, "sgd", 0.25),
        ({"optimizer": {"name": "rmsprop"}}, "rmsprop", 3e-4),
    ],
)
def test_the_optimiser_of_a_config(cfg, name, rate):
    chosen = optimizer_of(learning(**cfg))
    assert (chosen.name, chosen.learning_rate) == (name, rate)


def test_an_adaptive_rate_is_part_of_the_state():
    state = made(learning(learning_rate=0.005, lr_scheduler={"name": "adaptive"}))
    close(state["learning_rate"], 0.005)
    assert "learning_rate" not in state["hyper"], "it moves, so it is no hyperparameter"
    assert set(state["hyper"]["adaptive"].keys()) == {"desired_kl", "factor", "min_rate", "max_rate"}


def rates(cfg: dict | None, base: float, iterations: int, steps: int, turns: int = 1) -> list[float]:
    full = learning(lr_scheduler=cfg)
    groups, state = groups_of(full), TensorDict(made(full), [])
    state["hyper", "learning_rate"] = torch.tensor(base)
    state["iterations"] = torch.tensor(iterations)
    out = [learning_rates(state.set("update_step", torch.tensor(t)), groups, turns)["all"] for t in range(steps)]
    assert all(rate.dtype == torch.float32 and rate.ndim == 0 for rate in out)
    return [float(rate) for rate in out]


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (None, [0.8] * 6),
        ({"name": "linear"}, [0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),  # over the 4 iterations of the run
        (
            {"name": "linear", "kwargs": {"start_factor": 0.5, "end_factor": 1.0, "total_iters": 2}},
            [0.4, 0.6, *[0.8] * 4],
        ),
        ({"name": "cosine"}, [0.8, 0.4 + 0.4 * math.sqrt(0.5), 0.4, 0.4 - 0.4 * math.sqrt(0.5), 0.0, 0.0]),
        ({"name": "cosine", "kwargs": {"eta_min": 0.2, "T_max": 2}}, [0.8, 0.5, 0.2, 0.2, 0.2, 0.2]),
        ({"name": "step", "kwargs": {"step_size": 3, "gamma": 0.5}}, [0.8, 0.8, 0.8, 0.4, 0.4, 0.4]),
        ({"name": "exponential", "kwargs": {"gamma": 0.5}}, [0.8, 0.4, 0.2, 0.1, 0.05, 0.025]),
        (
            {"name": "warmup_constant", "kwargs": {"warmup_factor": 0.5, "warmup_iters": 2}},
            [0.4, 0.6, 0.8, 0.8, 0.8, 0.8],
        ),
        (
            {"name": "warmup_linear", "kwargs": {"warmup_factor": 0.5, "warmup_iters": 2, "end_factor": 0.25}},
            [0.4, 0.6, 0.8, 0.5, 0.2, 0.2],  # over the 4 iterations of the run
        ),
        (
            {"name": "warmup_linear", "kwargs": {"warmup_factor": 0.0, "warmup_iters": 1, "total_iters": 5}},
            [0.0, 0.8, 0.6, 0.4, 0.2, 0.0],
        ),
        (
            {"name": "warmup_cosine", "kwargs": {"warmup_factor": 0.5, "warmup_iters": 2, "eta_min": 0.2}},
            [0.4, 0.6, 0.8, 0.5, 0.2, 0.2],
        ),
        (
            {"name": "warmup_cosine", "kwargs": {"warmup_factor": 0.5, "warmup_iters": 1, "T_max": 3}},
            [0.4, 0.8, 0.4, 0.0, 0.0, 0.0],
        ),
    ],
)
def test_schedules_by_hand(cfg, expected):
    close(torch.tensor(rates(cfg, 0.8, 4, 6)), expected, tol=1e-6)


TURNS = [
    ({"name": "linear"}, [0.8, 0.6, 0.4, 0.2, 0.0]),  # over the 4 turns of the run
    ({"name": "linear", "kwargs": {"total_iters": 1}}, [0.8, 0.4, 0.0, 0.0, 0.0]),
    ({"name": "cosine", "kwargs": {"eta_min": 0.2, "T_max": 1}}, [0.8, 0.5, 0.2, 0.2, 0.2]),
    ({"name": "step", "kwargs": {"step_size": 1, "gamma": 0.5}}, [0.8, 0.8, 0.4, 0.4, 0.2]),
    ({"name": "exponential", "kwargs": {"gamma": 0.25}}, [0.8, 0.4, 0.2, 0.1, 0.05]),
    ({"name": "warmup_constant", "kwargs": {"warmup_factor": 0.5, "warmup_iters": 1}}, [0.4, 0.6, 0.8, 0.8, 0.8]),
    ({"name": "warmup_linear", "kwargs": {"warmup_factor": 0.5, "warmup_iters": 1}}, [0.4, 0.6, 0.8, 0.4, 0.0]),
    ({"name": "warmup_cosine", "kwargs": {"warmup_factor": 0.5, "warmup_iters": 1}}, [0.4, 0.6, 0.8, 0.4, 0.0]),
]


@pytest.mark.parametrize(("cfg", "expected"), TURNS, ids=lambda x: x.get("name") if isinstance(x, dict) else "")
def test_lengths_are_in_iterations_of_two_turns(cfg, expected):
    close(torch.tensor(rates(cfg, 0.8, 4, 5, turns=2)), expected, tol=1e-6)


def test_a_rate_that_was_set_to_zero_stays_zero_under_every_schedule():
    names = ("linear", "cosine", "step", "exponential", "warmup_constant", "warmup_linear", "warmup_cosine")
    for name in names:
        assert rates({"name": name}, 0.0, 4, 5) == [0.0] * 5


ADAPTIVE = {"desired_kl": 0.01, "factor": 2.0, "min_rate": 0.25, "max_rate": 2.0}


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        (1.0, 0.021, 0.5),
        (1.0, 0.019, 1.0),
        (1.0, 0.006, 1.0),
        (1.0, 0.004, 2.0),
        (1.0, 0.0, 2.0),
        (0.3, 9.0, 0.25),
        (1.5, 0.0, 2.0),
        (1.0, float("inf"), 0.5),
    ],
)
def test_adapted_rate_by_hand(variant, rate, kl, expected):
    numbers = hyper_tensors(ADAPTIVE, CPU)
    close(variant(adapted_rate)(torch.tensor(rate), torch.tensor(kl), numbers), expected)


@given(st.floats(0.25, 2.0), st.floats(0.0, 1.0))
def test_adapted_rate_is_bounded_and_falls_with_the_kl(rate, kl):
    numbers = hyper_tensors(ADAPTIVE, CPU)
    out, more = (float(adapted_rate(torch.tensor(rate), torch.tensor(x), numbers)) for x in (kl, kl + 0.1))
    assert 0.25 <= more <= out <= 2.0


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            {"learning_rate": 0.1, "lr_scheduler": {"name": "adaptive"}},
            "learning_rate 0.1 is outside the min_rate 1e-05 to max_rate 0.01 of lr_scheduler",
        ),
        (
            {"lr_scheduler": {"name": "adaptive", "kwargs": {"min_rate": 1e-3}}},
            "learning_rate 0.0003 is outside the min_rate",
        ),
        ({"lr_scheduler": {"name": "adaptive", "kwargs": {"factor": 1.0}}}, "factor"),
        ({"lr_scheduler": {"name": "adaptive", "kwargs": {"gamma": 0.5}}}, "adaptive does not use 'gamma'"),
        ({"lr_scheduler": {"name": "linear", "kwargs": {"desired_kl": 0.5}}}, "linear does not use 'desired_kl'"),
        ({"lr_scheduler": {"name": "plateau"}}, "name"),
        ({"lr_scheduler": {"name": "warmup_linear", "kwargs": {"start_factor": 1.0}}}, "does not use 'start_factor'"),
        (
            {"lr_scheduler": {"name": "warmup_linear", "kwargs": {"warmup_iters": 5, "total_iters": 5}}},
            "total_iters 5 must be above warmup_iters 5; change one of them",
        ),
        (
            {"lr_scheduler": {"name": "warmup_cosine", "kwargs": {"T_max": 9}}},
            "T_max 9 must be above warmup_iters 10; change one of them",
        ),
        (
            {"optimizer": {"name": "sgd", "kwargs": {"nesterov": True}}},
            "nesterov needs a momentum above 0; set kwargs.momentum, such as 0.9",
        ),
        ({"optimizer": {"name": "sgd", "kwargs": {"amsgrad": True}}}, "sgd does not use 'amsgrad'"),
        ({"optimizer": {"name": "adamw", "kwargs": {"centered": True}}}, "adamw does not use 'centered'"),
        (
            {"learning_rate": 0.1, "optimizer": {"name": "sgd"}},
            "learning_rate and optimizer exclude each other; keep one",
        ),
    ],
)
def test_faults(cfg, message):
    with pytest.raises(ValueError, match=message):
        learning(**cfg)


BOTH = {
    "actor": {"a": torch.tensor([1.0, 2.0]), "steps": torch.tensor([3.0], dtype=torch.float64)},
    "critic": {"c": torch.tensor([[4.0]])},
}


def group(name: str, *paths: str, **fields) -> Group:
    return Group(name, tuple((path,) for path in paths) or None, fields.pop("optimizer", "sgd"), None, **fields)


def test_packing_gives_one_vector_per_group_and_dtype_and_is_undone():
    params = TensorDict(BOTH, [])
    layout = layout_of(params, (group("rest"), group("value", "critic")))
    packed = pack(params, layout)
    values = {name: {dtype: x.tolist() for dtype, x in vectors.items()} for name, vectors in packed.items()}
    assert values == {"rest": {"float32": [1.0, 2.0], "float64": [3.0]}, "value": {"float32": [4.0]}}
    again = unpack(packed, layout)
    assert all(torch.equal(again[key], leaf) for key, leaf in params.items(True, True))


def test_a_large_parameter_is_a_vector_of_its_own_and_is_not_copied():
    """The small parameters before and after the large one share a vector. The norm is over all of them."""
    large = torch.linspace(-1.0, 1.0, 2**13).reshape(2, 2**12)
    params = TensorDict({"net": {"a": torch.ones(2), "b": large, "c": torch.full((3,), 2.0)}}, [])
    layout = layout_of(params, (group("all"),))
    packed = pack(params, layout)
    assert packed["all"]["float32"].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert packed["all"]["float32_1"].data_ptr() == large.data_ptr() and packed["all"]["float32_1"].shape == (2**13,)
    again = unpack(packed, layout)
    assert all(torch.equal(again[key], leaf) for key, leaf in params.items(True, True))
    clipped, norms = clip_gradients(packed, hyper_tensors({"max_grad_norm": 0.5}, CPU), layout)
    norm = math.sqrt(float((large.double() ** 2).sum()) + 14.0)
    close(norms["grad_norm"], norm, tol=1e-5)
    for name, vector in packed["all"].items():
        close(clipped["all"][name], vector * 0.5 / norm, tol=1e-6)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((group("one", "actor"),), "the parameter critic/c is in no group; put it in exactly one"),
        ((group("one", "actor", "critic"), group("two", "critic")), "critic/c is in the groups one and two"),
        ((group("one"), group("two", "value")), "group two: the policy has no parameters 'value', only actor, critic"),
    ],
)
def test_groups_are_disjoint_and_cover_the_parameters(groups, message):
    with pytest.raises(ConfigError, match=message):
        layout_of(TensorDict(BOTH, []), groups)


def test_every_group_has_an_optimiser_state_and_a_counter_of_its_own():
    opt = optimizer_init(TensorDict(BOTH, []), (group("rest", optimizer="adam"), group("value", "critic")))
    assert {name: sorted(state.keys()) for name, state in opt.items()} == {
        "rest": ["mu", "nu", "step"],
        "value": ["momentum", "step"],
    }
    assert list(opt["value", "momentum"].keys()) == ["critic"]


def test_every_group_may_have_a_rate_and_a_schedule_of_its_own():
    groups = group("rest"), Group("value", (("critic",),), "sgd", "exponential", "value_")
    hyper = {"learning_rate": torch.tensor(0.5), "value_learning_rate": torch.tensor(0.25)}
    hyper["value_schedule"] = TensorDict({"gamma": torch.tensor(0.5, dtype=torch.float64)}, [])
    counters = {"update_step": torch.tensor(2), "iterations": torch.tensor(4)}
    state = TensorDict({"hyper": TensorDict(hyper, []), **counters}, [])
    assert {name: float(rate) for name, rate in learning_rates(state, groups).items()} == {
        "rest": 0.5,
        "value": 0.0625,
    }


APART = {"actor": None, "critic": (("critic",),)}


def of_both(cfg: LearningConfig, own: dict[str, GroupSettings]) -> tuple[tuple[Group, ...], TensorDict]:
    """Groups and state of parameters in float32."""
    params = TensorDict({"actor": {"a": torch.tensor([1.0])}, "critic": {"c": torch.tensor([2.0])}}, [])
    groups = groups_of(cfg, APART, own)
    fields = learning_state(cfg, params, {}, CPU, groups, own)
    return groups, TensorDict({**fields, "update_step": torch.tensor(2), "iterations": torch.tensor(4)}, [])


def test_settings_of_a_group_are_numbers_under_its_prefix():
    schedule = SchedulerConfig.model_validate({"name": "exponential", "kwargs": {"gamma": 0.5}})
    sgd = OptimizerConfig.model_validate({"name": "sgd", "learning_rate": 0.4, "kwargs": {"momentum": 0.9}})
    own = {"critic": GroupSettings(optimizer=sgd, lr_scheduler=schedule, max_grad_norm=7.0)}
    groups, state = of_both(learning(learning_rate=0.1, lr_scheduler={"name": "linear"}), own)
    assert [(g.optimizer, g.schedule) for g in groups] == [
        ("adam", "linear"),
        ("sgd", "exponential"),
    ]
    hyper = state["hyper"]
    close(hyper["max_grad_norm"], 0.5)
    close(hyper["critic_max_grad_norm"], 7.0)
    close(hyper["critic_optimizer", "momentum"], 0.9)
    rates = learning_rates(state, groups)  # 2 of 4 iterations are done: half of 0.1, and 0.4 halved twice
    close(rates["actor"], 0.05)
    close(rates["critic"], 0.1)


@pytest.mark.parametrize("adapts", ["both", "critic", "actor"])
def test_an_adaptive_rate_of_a_group_lives_in_the_state(adapts):
    adaptive = SchedulerConfig(name="adaptive")
    constant = SchedulerConfig.model_validate({"name": "linear", "kwargs": {"end_factor": 1.0}})
    cfg = LearningConfig(learning_rate=0.001, lr_scheduler=None if adapts == "critic" else adaptive)
    schedule = {"both": None, "critic": adaptive, "actor": constant}[adapts]
    own = {"critic": GroupSettings(learning_rate=0.002, lr_scheduler=schedule)}
    groups, state = of_both(cfg, own)
    moving = {"both": {"critic_learning_rate", "learning_rate"}, "critic": {"critic_learning_rate"}}
    in_state = {*state.keys()} & moving["both"]
    assert in_state == moving.get(adapts, {"learning_rate"})
    assert {*state["hyper"].keys()} & moving["both"] == moving["both"] - in_state
    rates = learning_rates(state, groups)
    close(rates["actor"], 0.001)
    close(rates["critic"], 0.002)


@pytest.mark.parametrize("name", ["actor", "other"])
def test_settings_of_the_first_group_or_of_no_group_are_refused(name):
    cfg, own = learning(), {name: GroupSettings(learning_rate=1.0)}
    with pytest.raises(ValueError, match=f"group {name} cannot have its own settings; groups that can: critic"):
        groups_of(cfg, APART, own)
    with pytest.raises(ValueError, match=f"group {name} cannot have its own settings"):
        learning_state(cfg, PARAMS, {}, CPU, groups_of(cfg, APART), own)


@pytest.mark.parametrize("flag_all", [False, True])
def test_a_delayed_group_keeps_parameters_slots_and_counter(flag_all):
    """SGD with momentum 0.5 at rate 0.1, gradients 1 and 2; the critic moves in the second of three steps only."""
    sgd = {"name": "sgd", "learning_rate": 0.1, "kwargs": {"momentum": 0.5}}
    groups, state = of_both(learning(optimizer=sgd), {})
    layout = layout_of(state["params"], groups)
    params, opts = pack(state["params"], layout), pack_opt(state["opt"], layout)
    grads = pack(TensorDict({"actor": {"a": torch.tensor([1.0])}, "critic": {"c": torch.tensor([2.0])}}, []), layout)
    rates, history = learning_rates(state, groups), []
    for moves in (False, True, False):
        flags = {"critic": torch.tensor(moves)} | ({"actor": torch.tensor(True)} if flag_all else {})
        params, opts = optimizer_step(params, grads, opts, rates, state["hyper"], layout, flags)
        numbers = [(params[n]["float32"], opts[n]["momentum"]["float32"], opts[n]["step"]) for n in APART]
        history.append([[round(x.item(), 4) for x in row] for row in numbers])
    # actor: momentum 1, 1.5, 1.75; critic: 2 at its first step, from 2.0 down by 0.1 * 2
    assert history == [
        [[0.9, 1.0, 1], [2.0, 0.0, 0]],
        [[0.75, 1.5, 2], [1.8, 2.0, 1]],
        [[0.575, 1.75, 3], [1.8, 2.0, 1]],
    ]


def test_a_delay_of_an_unknown_group_is_refused():
    groups, state = of_both(learning(), {})
    layout = layout_of(state["params"], groups)
    params, opts = pack(state["params"], layout), pack_opt(state["opt"], layout)
    rates = learning_rates(state, groups)
    with pytest.raises(ValueError, match="group value, which does not exist; groups: actor, critic"):
        optimizer_step(params, params, opts, rates, state["hyper"], layout, {"value": torch.tensor(True)})
