"""Learning from minibatches, on losses whose steps are computed by hand."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.checks import assert_pure, close
from tensordict import TensorDict

from ecrl import rng
from ecrl.algorithms.core import Run, Static
from ecrl.algorithms.minibatch_sgd import (
    MinibatchConfig,
    _at_most,
    gradient_steps,
    mean_logs,
    minibatch_sgd,
    pass_keys,
    shuffled,
    sizes_of,
)
from ecrl.algorithms.optimizer import GroupSettings, groups_of, learning_state
from ecrl.algorithms.optimizer_config import OptimizerConfig
from ecrl.algorithms.ppo import PPOConfig, check_critic
from ecrl.algorithms.rows import rows_of
from ecrl.config import config_from_dict
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.loop.build import build, make_algorithm, static_of

CPU = torch.device("cpu")
SGD = {"name": "sgd", "learning_rate": 0.1}
NET = {"network_cfg": {"hidden_sizes": [4]}}


def setup(rows: int = 8, mask: Any = None, params: Any = None, **cfg: Any) -> tuple[Run, TensorDict, TensorDict]:
    """Return run, state and rows `x = 1, 2, ..` for `learned`; by default 8 steps of SGD at rate 0.1."""
    cfg = {"n_epochs": 2, "batch_size": 2, "optimizer": SGD, "max_grad_norm": 100.0} | cfg
    made = config_from_dict(
        {
            "trainer": {"iterations": 4, "compile": "off"},
            "env": "cartpole",
            "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
            "algorithm": {"name": "ppo", "cfg": cfg},
        }
    )
    params = TensorDict({"w": torch.tensor(0.0)}, []) if params is None else params
    algorithm: Any = made.algorithm.cfg
    numbers = {name: getattr(algorithm, name) for name in ("target_kl", "critic_max_grad_norm")}
    record = make_algorithm(made.algorithm)
    state = learning_state(algorithm, params, numbers, CPU, record.choices.sgd.groups)
    state |= {"norm": TensorDict({}, []), "key": rng.key(5)}
    state |= {"update_step": torch.tensor(0), "iterations": torch.tensor(4)}
    mask = torch.ones(rows, dtype=torch.bool) if mask is None else torch.tensor(mask)
    data = TensorDict({"x": torch.arange(1.0, rows + 1), "mask": mask}, [rows])
    return Run(None, None, record, partial, scan, static_of(made, build(made).policy)), TensorDict(state, []), data  # pyright: ignore


def learned(run: Run, state: TensorDict, rows: TensorDict, loss: Any, variant: Any, **settings: Any) -> Any:
    """`minibatch_sgd` with the KL as the distance; a loss of these tests takes `variant` in place of the policy."""

    def of_run(run: Run, *rest: Any) -> Any:
        return loss(variant, *rest)

    sgd = run.algorithm.choices.sgd
    return minibatch_sgd(run, state, rows, of_run, sgd, whole=settings, distance="approx_kl", limit="target_kl")


def walk(kl_of: Any, params: TensorDict, batch: TensorDict, mask: torch.Tensor, hyper: TensorDict):
    """Gradient -1: `w` grows by the learning rate at each step. The KL is what `kl_of` makes of `w`."""
    counted = mask.sum().to(torch.float32)
    return -params["w"] * (counted > 0), {"approx_kl": kl_of(params["w"].detach()), "count": counted}


def itself(w: torch.Tensor) -> torch.Tensor:
    return w.clone()


def test_shuffled_visits_every_row_once_per_epoch_and_fills_up_small_batches():
    index, real = shuffled(rng.split(rng.key(0), 3), [4, 4, 2], 4)
    assert index.shape == real.shape == (9, 4)
    for epoch in range(3):
        rows, counted = index[3 * epoch : 3 * epoch + 3], real[3 * epoch : 3 * epoch + 3]
        assert sorted(rows[counted].tolist()) == list(range(10))
        assert counted.sum(1).tolist() == [4, 4, 2]
        assert not counted[-1, 2:].any()
        assert set(rows[-1, 2:].tolist()) == {int(rows[-1, 0])}  # each row is a batch, so no other row can enter
    assert index[:3].tolist() != index[3:6].tolist()


@pytest.mark.parametrize(
    ("cfg", "rows", "sizes"),
    [
        ({"batch_size": 4}, 12, [4, 4, 4]),
        ({"batch_size": 4}, 10, [4, 4, 2]),
        ({"batch_size": 10}, 10, [10]),
        ({}, 130, [64, 64, 2]),
        ({"num_minibatches": 3}, 12, [4, 4, 4]),
        ({"num_minibatches": 3}, 10, [4, 3, 3]),
        ({"num_minibatches": 6}, 10, [2, 2, 2, 2, 1, 1]),  # six, where ten rows in twos would be five
        ({"num_minibatches": 1}, 10, [10]),
    ],
)
def test_sizes(cfg, rows, sizes):
    assert sizes_of(MinibatchConfig(**cfg), rows) == sizes


@pytest.mark.parametrize("key", ["batch_size", "num_minibatches"])
def test_sizes_above_the_rollout_are_lowered_with_one_warning(key):
    _at_most.cache_clear()  # the warning appears once in a process
    cfg, expected = MinibatchConfig(**{key: 11}), {"batch_size": [7], "num_minibatches": [1] * 7}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sizes_of(cfg, 7) == sizes_of(cfg, 7) == expected[key]
    assert [str(w.message) for w in caught] == [f"algorithm.cfg.{key} 11 is above the rollout's 7 transitions; using 7"]


def test_a_number_of_minibatches_above_the_sequences_names_sequences():
    _at_most.cache_clear()
    with pytest.warns(UserWarning, match="num_minibatches 13 is above the rollout's 3 sequences; using 3"):
        assert sizes_of(MinibatchConfig(num_minibatches=13), 3, 8) == [1, 1, 1]


def test_gradient_steps_count_minibatches_of_whole_sequences():
    # 6 environments of 8 steps: 20 steps hold 2 sequences, so a pass has 3 steps, and 48 transitions in twenties too
    cfg, static = MinibatchConfig(batch_size=20, n_epochs=2), Static(6, 8, 1)
    assert gradient_steps(cfg, static) == 2 * 3
    assert gradient_steps(cfg, static._replace(row_steps=8)) == 2 * 3
    # the default of 64 is below a sequence of 100 steps, so each of the 6 is a minibatch
    assert gradient_steps(MinibatchConfig(n_epochs=2), Static(6, 100, 1, 1, row_steps=100)) == 2 * 6
    with pytest.raises(ConfigError, match=r"^algorithm.cfg.batch_size: 5 is below 8, the length of the sequences"):
        gradient_steps(MinibatchConfig(batch_size=5), static._replace(row_steps=8))


def test_one_of_size_and_number():
    with pytest.raises(ValueError, match="batch_size and num_minibatches exclude each other; keep one"):
        MinibatchConfig(batch_size=4, num_minibatches=4)


def test_mean_logs_weights_by_count():
    # 3 rows with loss 1 and 1 row with loss 5: (3 * 1 + 1 * 5) / 4; what does not count may be anything
    counts = {1.0: 3.0, 5.0: 1.0, float("inf"): 0.0, float("nan"): 0.0}
    loss, count = torch.tensor(list(counts)), torch.tensor(list(counts.values()))
    assert mean_logs({"loss": loss}, count) == {"loss": torch.tensor(2.0)}
    assert mean_logs({"loss": loss[2:]}, count[2:]) == {"loss": torch.tensor(0.0)}


def test_learn_is_pure_and_takes_every_step():
    parts, state, rows = setup()
    after, logs = assert_pure(learned, parts, state, rows, walk, itself)
    close(after["params", "w"], 0.8)  # 2 epochs of 4 steps of 0.1
    close(logs["approx_kl"], 0.35)  # the mean of 0, 0.1, .., 0.7
    close(logs["grad_norm"], 1.0)
    assert set(logs) == {"loss", "approx_kl", "grad_norm", "learning_rate"}
    assert "learning_rate" not in after


# `w` is 0, 0.1, 0.2, .. before each of the 8 steps. The first one whose KL is above the target does not happen.
@pytest.mark.parametrize(("target", "steps", "kl"), [(0.25, 3, 0.1), (0.05, 1, 0.0), (0.65, 7, 0.3), (9.0, 8, 0.35)])
def test_beyond_the_target_kl_nothing_moves(target, steps, kl):
    parts, state, rows = setup(target_kl=target)
    after, logs = learned(parts, state, rows, walk, itself)
    close(after["params", "w"], 0.1 * steps)
    assert after["opt", "step"] == steps
    close(logs["skipped_frac"], (8 - steps) / 8)
    close(logs["approx_kl"], kl)
    close(logs["grad_norm"], 1.0)


def test_a_stop_is_latched():
    """The KL falls again after the stop, as with a noisy minibatch, but learning does not continue."""
    steps_taken = []

    def once(variant, params, batch, mask, hyper):
        steps_taken.append(len(steps_taken))
        return -params["w"], {"approx_kl": torch.tensor(float(steps_taken[-1] == 2)), "count": mask.sum().float()}

    parts, state, rows = setup(target_kl=0.5)
    after, logs = learned(parts, state, rows, once, None)
    close(after["params", "w"], 0.2)
    close(logs["skipped_frac"], 6 / 8)


def skipping(run: Run) -> Run:
    return run._replace(static=run.static._replace(skips_nonfinite=True))


def failing(bad: Any, params: TensorDict, batch: TensorDict, mask: torch.Tensor, hyper: TensorDict):
    """`walk` with a gradient of NaN for the minibatches with a row of `bad`."""
    loss, logs = walk(itself, params, batch, mask, hyper)
    is_bad = torch.isin(batch["x"], bad).any()
    return loss * torch.where(is_bad, torch.nan, 1.0), logs


def test_only_the_gradient_step_with_nan_is_skipped():
    run, state, rows = setup()
    after, logs = learned(skipping(run), state, rows, failing, torch.tensor(3.0))
    close(after["params", "w"], 0.6)  # of 2 epochs of 4 steps of 0.1, each with one minibatch that has row 3
    assert after["opt", "step"] == 6 and logs["skipped_steps"] == 2.0
    assert all(log.isfinite() for log in logs.values())
    after, logs = learned(run, state, rows, failing, torch.tensor(3.0))
    assert after["params", "w"].isnan() and "skipped_steps" not in logs


def far_and_failing(bad: Any, params: TensorDict, batch: TensorDict, mask: torch.Tensor, hyper: TensorDict):
    """`failing` with an infinite KL for the failing minibatches."""
    loss, logs = failing(bad, params, batch, mask, hyper)
    is_bad = torch.isin(batch["x"], bad).any()
    return loss, logs | {"approx_kl": torch.where(is_bad, torch.inf, 0.0)}


def test_a_gradient_step_that_is_left_out_does_not_stop_the_others():
    run, state, rows = setup(target_kl=0.5)
    after, logs = learned(skipping(run), state, rows, far_and_failing, torch.tensor(3.0))
    close(after["params", "w"], 0.6)
    assert logs["skipped_steps"] == 2.0 and logs["skipped_frac"] == 0.0


def test_logs_are_nan_if_every_gradient_step_is_left_out():
    run, state, rows = setup()
    after, logs = learned(skipping(run), state, rows, failing, rows["x"])
    assert after["params", "w"] == 0.0 and after["opt", "step"] == 0
    assert logs["skipped_steps"] == 8.0 and logs["loss"].isnan() and logs["learning_rate"].isfinite()


def test_the_stop_is_forgotten_with_the_next_rollout():
    parts, state, rows = setup(target_kl=0.25)
    zero = TensorDict({"w": torch.tensor(0.0)}, [])
    for _ in range(2):
        state, logs = learned(parts, state.copy().set("params", zero), rows, walk, itself)
        close(state["params", "w"], 0.3)
        close(logs["skipped_frac"], 5 / 8)


@pytest.mark.parametrize("junk", [float("inf"), float("nan")])
def test_what_a_skipped_step_holds_reaches_neither_parameters_nor_logs(junk):
    def explode(variant, params, batch, mask, hyper):
        wild = params["w"].detach() > 0.15
        kl = torch.where(wild, torch.inf, 0.0)
        logs = {"approx_kl": kl, "other": torch.where(wild, junk, 7.0), "count": mask.sum().float()}
        return -params["w"] * torch.where(wild, junk, 1.0), logs

    parts, state, rows = setup(target_kl=0.5)
    after, logs = learned(parts, state, rows, explode, None)
    close(after["params", "w"], 0.2)
    close(logs["other"], 7.0)
    close(logs["approx_kl"], 0.0)
    close(logs["grad_norm"], 1.0)


def adaptive(**kwargs: Any) -> dict[str, Any]:
    return {"lr_scheduler": {"name": "adaptive", "kwargs": {"min_rate": 0.01, "max_rate": 0.3} | kwargs}}


def test_adaptive_rate_by_hand():
    # desired 0.25: above 0.5 the rate is halved, below 0.125 doubled, before the step that measured it. From rate 0.1:
    # w 0 -> rate 0.2, 0.2 -> same, 0.4 -> same, 0.6 -> 0.1, 0.7 -> 0.05, 0.75 -> 0.025, 0.775 -> 0.0125,
    # .7875 -> 0.00625, held at 0.01
    parts, state, rows = setup(**adaptive(desired_kl=0.25, factor=2.0))
    after, logs = learned(parts, state, rows, walk, itself)
    close(after["params", "w"], 0.7975)
    close(after["learning_rate"], 0.01)
    close(logs["learning_rate"], 0.01)
    close(state["learning_rate"], 0.1)
    assert "learning_rate" not in state["hyper"], "it moves, so it is no hyperparameter"


def test_adaptive_rate_goes_on_from_the_last_rollout_and_stays_in_its_bounds():
    # never any KL: 0.1 * 1.5^2 = 0.225 in one pass of two steps; then held at 0.3
    parts, state, rows = setup(rows=4, n_epochs=1, **adaptive(factor=1.5))
    for expected in (0.225, 0.3, 0.3):
        state, _ = learned(parts, state, rows, walk, torch.zeros_like)
        close(state["learning_rate"], expected)


def test_the_rate_rests_once_the_target_is_exceeded():
    """The rate uses the KL that stopped the epochs, because the steps before caused it; later ones are not measured."""
    parts, state, rows = setup(target_kl=0.25, **adaptive(desired_kl=0.1, factor=2.0))
    after, logs = learned(parts, state, rows, walk, itself)
    # w 0 -> rate 0.2; 0.2 is between 0.05 and 0.2 (float32: 0.2 is not above 2 * 0.1) -> w 0.4, above 0.25: stop, halve
    close(after["params", "w"], 0.4)
    close(after["learning_rate"], 0.1)
    close(logs["skipped_frac"], 6 / 8)


def test_a_minibatch_in_which_nothing_counts_is_no_evidence():
    parts, state, rows = setup(rows=4, mask=[False] * 4, **adaptive(factor=1.5))
    after, logs = learned(parts, state, rows, walk, itself)
    assert after["params", "w"] == 0.0
    close(after["learning_rate"], 0.1)
    assert all(torch.isfinite(log) for log in logs.values())


def test_masked_rows_and_filling_do_not_reach_the_loss():
    """5 rows in batches of 2: the third batch is padded and one row is masked, so each epoch sums 1 + 2 + 4 + 5."""

    def summed(variant, params, batch, mask, hyper):
        total = batch["x"].masked_fill(~mask, 0.0).sum()
        return -params["w"] * total, {"approx_kl": total * 0, "count": mask.sum().float()}

    parts, state, rows = setup(rows=5, mask=[True, True, False, True, True])
    rows["x"][2] = torch.nan
    after, _ = learned(parts, state, rows, summed, None)
    close(after["params", "w"], 0.1 * 2 * 12)


def two_groups() -> TensorDict:
    return TensorDict({"actor": {"a": torch.tensor(0.0)}, "critic": {"c": torch.tensor(0.0)}}, [])


def pull(variant, params, batch, mask, hyper):
    """Gradients 3 and 4."""
    value = -3.0 * params["actor", "a"] - 4.0 * params["critic", "c"]
    return value, {"approx_kl": value.detach() * 0, "count": mask.sum().float()}


def test_clipping_together_and_apart():
    once = {"rows": 2, "n_epochs": 1, "params": two_groups(), "max_grad_norm": 1.0}
    parts, state, rows = setup(**once)  # norm 5 held at 1: 3/5 and 4/5, at rate 0.1
    after, logs = learned(parts, state, rows, pull, None)
    close(after["params", "actor", "a"], 0.06)
    close(after["params", "critic", "c"], 0.08)
    close(logs["grad_norm"], 5.0)
    assert "critic_grad_norm" not in logs

    parts, state, rows = setup(**once, critic_max_grad_norm=2.0)  # 3 held at 1, and 4 at 2
    after, logs = learned(parts, state, rows, pull, None)
    close(after["params", "actor", "a"], 0.1)
    close(after["params", "critic", "c"], 0.2)
    close(logs["grad_norm"], 3.0)
    close(logs["critic_grad_norm"], 4.0)


def test_two_groups_move_at_their_own_rates_with_their_own_optimisers():
    """One group descends by SGD at rate 0.1 and norm 100, the other by Adam at rate 0.5: its first step is the rate."""
    run, state, rows = setup(rows=2, n_epochs=1, params=two_groups())
    cfg = MinibatchConfig(optimizer=SGD, max_grad_norm=100.0)  # pyright: ignore
    own = {"critic": GroupSettings(learning_rate=0.5, optimizer=OptimizerConfig(name="adam"))}
    groups = groups_of(cfg, {"actor": None, "critic": (("critic",),)}, own)
    sgd = run.algorithm.choices.sgd._replace(groups=groups)
    run = run._replace(algorithm=replace(run.algorithm, choices=run.algorithm.choices._replace(sgd=sgd)))
    fresh = learning_state(cfg, two_groups(), {}, CPU, groups, own)
    after, logs = learned(run, state.copy().update(fresh), rows, pull, None)
    close(after["params", "actor", "a"], 0.3)  # 0.1 * 3
    close(after["params", "critic", "c"], 0.5)
    assert (after["opt", "actor", "step"], after["opt", "critic", "step"]) == (1, 1)
    close(logs["critic_grad_norm"], 4.0)
    close(logs["learning_rate"], 0.1)
    close(logs["critic_learning_rate"], 0.5)


ONE = torch.tensor(1.0)
WRONG_LOSSES = {  # what the loss returns, and the line
    "one value": (ONE, "returns float32 [], expected 2: (loss, logs); return these values"),
    "rows": (
        (torch.ones(2), {"approx_kl": ONE}),
        "returns the loss as float32 [2], expected a 0-d tensor; return its mean",
    ),
    "log of rows": (
        (ONE, {"approx_kl": ONE, "x": torch.ones(2)}),
        "returns the log x as float32 [2], expected a 0-d tensor; return its mean",
    ),
    "number": (
        (ONE, {"approx_kl": ONE, "x": 0.5}),
        "returns the log x as float 0.5, expected a 0-d tensor; return one",
    ),
    "no logs": ((ONE, None), "returns NoneType None as logs, expected a dict of 0-d tensors; return one"),
    "no distance": ((ONE, {"kl": ONE}), "returns no log 'approx_kl', the `distance`, only kl; add the log"),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_a_loss_that_breaks_its_contract_is_refused_in_one_line(case):
    out, line = WRONG_LOSSES[case]
    with pytest.raises(ConfigError) as error:
        learned(*setup(), lambda *_: out, None)
    assert str(error.value) == f"algorithm ppo: loss {line}"


def test_a_field_without_an_entry_for_each_step_is_refused():
    steps = TensorDict({"done": torch.zeros(4, 3, dtype=torch.bool), "obs": torch.zeros(4, 3, 2)}, [4, 3])
    with pytest.raises(ConfigError) as error:
        rows_of(setup()[0], TensorDict({"steps": steps}, [4]), coef=torch.tensor(1.0))
    line = "the field coef is float32 [], expected [4, 2] or more axes; pass one entry per step"
    assert str(error.value) == f"algorithm ppo: {line}"


def test_logs_need_no_names():
    """Without a distance, and without a count, the loss reports nothing; rows that count are counted by the mask."""

    def bare(run, params, batch, mask, hyper):
        return -params["w"] * batch["x"].masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1), {}

    run, state, rows = setup(rows=4, mask=[True, True, True, False], batch_size=4, n_epochs=1)
    after, logs = minibatch_sgd(run, state, rows, bare, run.algorithm.choices.sgd)
    close(after["params", "w"], 0.1 * (1 + 2 + 3) / 3)
    assert set(logs) == {"loss", "grad_norm", "learning_rate"}


def test_an_adaptive_rate_needs_a_distance():
    run, state, rows = setup(rows=4, batch_size=4)
    groups = tuple(group._replace(schedule="adaptive") for group in run.algorithm.choices.sgd.groups)
    with pytest.raises(ConfigError, match=r"^minibatch_sgd: a learning rate is adaptive, but `distance` is None; name"):
        minibatch_sgd(run, state, rows, lambda *args: (args, {}), run.algorithm.choices.sgd._replace(groups=groups))


@pytest.mark.parametrize("key", ["critic_max_grad_norm", "critic_learning_rate"])
def test_settings_of_a_critic_need_a_critic(key):
    cfg = PPOConfig(**{key: 1.0})
    check_critic(two_groups(), cfg)
    with pytest.raises(ConfigError, match=f"{key}: the policy has no parameters 'critic', only actor"):
        check_critic(two_groups().exclude("critic"), cfg)


OPTIMIZERS = [
    ("adam", {"betas": [0.8, 0.95], "eps": 1e-3}, lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.95), eps=1e-3)),
    ("adamw", {"weight_decay": 0.3}, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
    ("sgd", {"momentum": 0.7}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.7)),
    ("rmsprop", {"alpha": 0.9, "eps": 1e-2}, lambda p: torch.optim.RMSprop(p, 0.1, alpha=0.9, eps=1e-2)),
]
FAST = {"betas": [0.5, 0.7]}
VARIANTS = [
    ("adam", {"weight_decay": 0.3}, lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.3)),
    ("adam", FAST | {"amsgrad": True}, lambda p: torch.optim.Adam(p, 0.1, betas=(0.5, 0.7), amsgrad=True)),
    (
        "adamw",
        FAST | {"amsgrad": True, "weight_decay": 0.3},
        lambda p: torch.optim.AdamW(p, 0.1, betas=(0.5, 0.7), amsgrad=True, weight_decay=0.3),
    ),
    (
        "sgd",
        {"momentum": 0.7, "nesterov": True, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.7, nesterov=True, weight_decay=0.3),
    ),
    (
        "rmsprop",
        {"alpha": 0.9, "eps": 1e-2, "centered": True, "weight_decay": 0.3},
        lambda p: torch.optim.RMSprop(p, 0.1, alpha=0.9, eps=1e-2, centered=True, weight_decay=0.3),
    ),
]
SCHEDULES = [
    (None, None),
    ({"name": "linear"}, lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 4)),  # 4 iterations
    ({"name": "cosine", "kwargs": {"eta_min": 0.02}}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4, 0.02)),
    ({"name": "step", "kwargs": {"step_size": 2, "gamma": 0.1}}, lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1)),
    ({"name": "exponential", "kwargs": {"gamma": 0.5}}, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)),
]
RUNS = [(*optimizer, *schedule) for optimizer in OPTIMIZERS for schedule in SCHEDULES]
RUNS += [(*variant, None, None) for variant in VARIANTS]


def regression(variant, params, batch, mask, hyper):
    error = (batch["x"] / 5.0 * params["w"] - 3.0).masked_fill(~mask, 0.0).square().sum() / mask.sum()
    return error, {"approx_kl": error.detach() * 0, "count": mask.sum().float()}


@pytest.mark.ref
@pytest.mark.parametrize(("name", "kwargs", "make", "schedule", "make_schedule"), RUNS)
def test_four_rollouts_as_torchs_optimisers_and_schedules(name, kwargs, make, schedule, make_schedule):
    optimizer = {"name": name, "learning_rate": 0.1, "kwargs": kwargs}
    parts, state, rows = setup(rows=5, optimizer=optimizer, lr_scheduler=schedule)
    w = torch.nn.Parameter(torch.tensor(0.0))
    theirs = make([w])
    scheduler = make_schedule(theirs) if make_schedule else None
    for _ in range(4):
        index, real = shuffled(pass_keys(state, 2), [2, 2, 1], 2)
        for i, r in zip(index, real, strict=True):
            theirs.zero_grad()
            (rows["x"][i][r] / 5.0 * w - 3.0).square().mean().backward()
            theirs.step()
        rate = theirs.param_groups[0]["lr"]
        state, logs = learned(parts, state, rows, regression, None)
        state["update_step"] = state["update_step"] + 1
        close(logs["learning_rate"], rate)
        close(state["params", "w"], w.detach(), tol=1e-4)  # 24 steps, bias corrections in float64 here
        if scheduler:
            scheduler.step()


def _fitted(variant, params, batch, mask, hyper):
    """The squared error of `w x`, whose gradient differs from row to row."""
    count = mask.sum().to(torch.float32)
    error = (params["w"] * batch["x"] - batch["y"]).square().masked_fill(~mask, 0.0)
    return error.sum() / count.clamp(min=1.0), {"approx_kl": torch.zeros(()), "count": count}


def _spread(x, mask):
    return x / x.masked_fill(~mask, 0.0).max()


@pytest.mark.parametrize("parts_of", [3, 7, 2048])
def test_a_minibatch_in_parts_is_the_minibatch(parts_of, monkeypatch):
    """Gradients of the mean and values of the whole batch do not depend on the chunk size, also ragged and masked."""
    monkeypatch.setattr("ecrl.kernels.scan_loop._CPU_ROWS", parts_of)
    parts, state, rows = setup(rows=20, mask=[i % 5 != 2 for i in range(20)], batch_size=8, n_epochs=1)
    rows = rows.copy().set("y", rows["x"] / 20.0).set("x", rows["x"] / 20.0)
    after, _ = learned(parts, state, rows, _fitted, None, y=_spread)
    w, (index, real) = 0.0, shuffled(pass_keys(state, 1), [8, 8, 4], 8)
    for i, r in zip(index, real, strict=True):
        x = rows["x"][i[r]].double()
        counted = rows["mask"][i[r]]
        y = x / x[counted].max()
        w -= 0.1 * float((2.0 * (w * x - y) * x)[counted].mean())
    close(after["params", "w"], w, tol=1e-6)
