"""The key of compiled functions: it has no floats, and nothing that does not shape the graph."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from support.graphs import traced_only
from support.long_cases import long_except
from support.small_runs import NET, last_state, same, small
from tensordict import TensorDict

import ecrl
from ecrl import rng
from ecrl.config import Config, PolicyConfig, config_from_dict
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.policies import Policy, make_policy
from ecrl.policies.heads import headed, make_head
from ecrl.pytree import exact
from ecrl.registry import InitOnly, register_policy
from ecrl.run.resume import resume
from ecrl.spaces import Discrete, box

OPTIMIZERS = [
    {"learning_rate": 0.01},
    {"optimizer": {"name": "adamw", "learning_rate": 0.01, "kwargs": {"weight_decay": 0.02, "amsgrad": True}}},
    {"optimizer": {"name": "sgd", "learning_rate": 0.01}},
    {"optimizer": {"name": "rmsprop", "learning_rate": 0.01}},
]
SCHEDULES = [
    {"name": "linear", "kwargs": {"total_iters": 3}},
    {"name": "cosine", "kwargs": {"T_max": 3}},
    {"name": "step", "kwargs": {"step_size": 3}},
    {"name": "exponential"},
    {"name": "warmup_linear", "kwargs": {"warmup_iters": 2}},
    {"name": "warmup_cosine", "kwargs": {"warmup_iters": 2}},
]
ADAPTIVE = {"name": "adaptive"}
OPTIONAL = {
    "ppo": {"batch_size": 16, "target_kl": 0.05, "critic_learning_rate": 0.005, "critic_max_grad_norm": 0.3},
    "grpo": {"batch_size": 16, "kl_coef": 0.1, "target_kl": 0.05, "group_size": 2, "ref_update_freq": 3},
    "apg": {"segment_length": 4},
}
"""Settings of each algorithm under which it has the most numbers."""
CLIPS = {"clip_coef_high": 0.3, "dual_clip": 3.0}
LIMITS = {"min_group_score": -100.0, "max_group_score": 100.0}
BOUNDED = ("factor", "rate", "dual_clip", "group_score")
"""Parts of the names of keys that bound each other, so that a config may refuse a value."""


def config(algorithm: str, optimizer: dict, schedule: dict, **more: float) -> Config:
    """A run that reads as many numbers as possible."""
    gains = {**NET, "network_cfg": {**NET["network_cfg"], "orthogonal_init": [1.0, 0.5]}}
    policy = {"name": "actor_critic", "actor": gains, "critic": {**NET}, "normalize_obs": True}
    policy["critic"]["network_cfg"] = {**NET["network_cfg"], "orthogonal_init": 1.0}
    return config_from_dict(
        {
            "trainer": {"num_envs": 4, "buffer_size": 8, "iterations": 4, "compile": "on"},
            "env": "point_mass",
            "policy": policy,
            "algorithm": {
                "name": algorithm,
                "cfg": {**OPTIONAL[algorithm], **optimizer, "lr_scheduler": schedule, **more},
            },
        }
    )


CONFIGS = [
    *(config("ppo", optimizer, SCHEDULES[0]) for optimizer in OPTIMIZERS),
    *(config(name, OPTIMIZERS[0], schedule) for name in ("apg", "grpo") for schedule in SCHEDULES),
    config("ppo", OPTIMIZERS[0], ADAPTIVE),
    config("ppo", OPTIMIZERS[0], SCHEDULES[0], **CLIPS),
    config("grpo", OPTIMIZERS[0], SCHEDULES[0], **CLIPS, **LIMITS),
]
COUNTS = {"total_iters", "T_max", "step_size", "warmup_iters", "ref_update_freq", "segment_length"}
"""Integers that count iterations or steps, and so shape nothing. A policy with memory does not train here."""


def numbers(value: Any, path: str = "") -> Iterator[str]:
    """The dotted keys of the floats and counts of a config. A list of floats has one key."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name in COUNTS and part is not None:
                yield f"{path}{name}"
            else:
                yield from numbers(part, f"{path}{name}.")
    elif isinstance(value, float) or (isinstance(value, list) and value and isinstance(value[0], float)):
        yield path.removesuffix(".")


def floats_of(model: type[BaseModel]) -> set[str]:
    """The names of the fields of a config model that take a float."""
    return {name for name, field in model.model_fields.items() if "float" in str(field.annotation)}


def keys_of(cfg: Config) -> list[str]:
    """The dotted keys of the numbers of the policy and the algorithm of a config, and the seed and the length."""
    data = cfg.model_dump(mode="json")
    parts = {name: data[name] for name in ("policy", "algorithm")}
    skipped = ("policy.actor.network_cfg.dropout_p", "policy.critic.network_cfg.dropout_p")  # must be 0
    return [key for key in numbers(parts) if key not in skipped] + ["trainer.seed", "trainer.iterations"]


def changed(cfg: Config, draw: Any) -> Config:
    """The config with each of its numbers drawn anew; a draw that the config refuses keeps the old number."""
    data = cfg.model_dump(mode="json")
    for key in keys_of(cfg):
        *path, name = key.split(".")
        part = data
        for step in path:
            part = part[step]
        old = part[name]
        one = st.integers(1, 10**6) if isinstance(old, int) else st.floats(1e-3, 0.9)
        new = [draw(one) for _ in old] if isinstance(old, list) else draw(one)
        try:
            cfg = cfg.replace(**{key: new})
        except ecrl.ConfigError:
            part[name] = old
    return cfg


def test_the_configs_have_every_float_of_the_shipped_algorithms_and_policies():
    from ecrl.algorithms.optimizer_config import OptimizerKwargs, SchedulerKwargs
    from ecrl.policies.mlp import MLPConfig

    tested = {key.split(".")[-1] for cfg in CONFIGS for key in keys_of(cfg)}
    models = {type(cfg.algorithm.cfg) for cfg in CONFIGS} | {type(cfg.policy) for cfg in CONFIGS}
    models |= {OptimizerKwargs, SchedulerKwargs, MLPConfig}
    assert set().union(*map(floats_of, models)) - {"dropout_p"} <= tested
    assert tested >= COUNTS


def leaves(key: Any) -> Iterator[Any]:
    """The values in a key that is made of tuples and records; functions and classes are values."""
    if isinstance(key, tuple):
        for part in key:
            yield from leaves(part)
    elif is_dataclass(key) and not isinstance(key, type):
        for one in fields(key):
            if one.compare:
                yield from leaves(getattr(key, one.name))
    else:
        yield key


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: f"{cfg.algorithm.name}_{cfg.algorithm.cfg.lr_scheduler.name}")
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_run_with_other_numbers_has_the_same_key(cfg: Config, data: Any):
    other = changed(cfg, data.draw)
    first, second = build(cfg), build(other)
    assert first == second and hash(first) == hash(second) and exact(first) == exact(second)
    parts = first.policy, first.algorithm, first.static
    assert [x for x in leaves(parts) if isinstance(x, float)] == []


@pytest.fixture
def graphs():
    with traced_only() as names:
        yield names


@pytest.mark.slow
@pytest.mark.parametrize("cfg", long_except(CONFIGS[:1], CONFIGS), ids=lambda cfg: cfg.algorithm.name)
def test_a_run_with_other_numbers_compiles_nothing(graphs, cfg: Config):
    cfg = cfg.replace(**{"trainer.iterations": 2})
    last_state(cfg)
    before = len(graphs)
    assert before > 0
    changes: dict[str, Any] = {key: 0.5 for key in keys_of(cfg) if key.startswith("algorithm")}
    changes = {key: 2 if key.split(".")[-1] in COUNTS else value for key, value in changes.items()}
    other = cfg
    for key, value in changes.items():
        try:
            other = other.replace(**{key: [0.5, 0.25] if "betas" in key else value})
        except ecrl.ConfigError as error:
            assert any(name in key for name in BOUNDED), error
    gains = {"policy.actor.network_cfg.orthogonal_init": [0.3, 2.0], "policy.critic.network_cfg.orthogonal_init": 0.1}
    other = other.replace(**gains, **{"policy.initial_log_std": -2.0, "trainer.seed": 5, "trainer.iterations": 3})
    state = last_state(other)
    assert len(graphs) == before, graphs[before:]
    assert not same(init_state(cfg)["params"], init_state(other)["params"])
    assert torch.equal(init_state(other)["params", "log_std"], torch.full((2,), -2.0))
    assert int(state["update_step"]) == 3


class ScaledConfig(PolicyConfig):
    scale: float = Field(1.0, description="factor of the logits")
    start: Annotated[float, InitOnly()] = Field(0.0, description="first weights")


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_a_float_that_only_init_reads_does_not_tell_policies_apart_and_any_other_does(normalize_obs, restored_registry):
    @register_policy("scaled")
    def scaled(cfg: ScaledConfig, observation_space: Any, action_space: Any) -> Policy:
        def init(key):
            return TensorDict({"w": torch.full((3, action_space.n), cfg.start)}, [])

        def output(params, obs):
            return None, cfg.scale * (obs @ params["w"])

        return headed(make_head(action_space, squash=False), init, output)

    def made(**cfg):
        block = {"name": "scaled", "normalize_obs": normalize_obs, **cfg}
        return make_policy(block, box(-1.0, 1.0, 3), Discrete(2))

    first, other_start, other_scale = made(), made(start=2.0), made(scale=2.0, start=2.0)
    assert first == other_start and first != other_scale and other_start != other_scale
    starts = [policy.init(rng.key(0))["w"][0, 0].item() for policy in (first, other_start, other_scale, made())]
    assert starts == [0.0, 2.0, 2.0, 0.0]
    assert made(start=-0.0) == first and made(scale=0.0) != made(scale=-0.0)


LINEAR = {"algorithm.cfg.lr_scheduler": {"name": "linear"}, "algorithm.cfg.learning_rate": 0.8}


def rates(cfg: Config, state: TensorDict | None = None) -> list[float]:
    """The learning rates that a run logs."""
    start = init_state(cfg) if state is None else state
    return [float(r["logs"]["learning_rate"]) for r in train_iter(start, cfg) if r["log_type"] == "train"]


def test_a_schedule_has_the_length_of_the_config_that_trains():
    """The state of a run of 4 iterations, then 8: its rate is at 1/2 of the way after 4 iterations."""
    cfg = small(**LINEAR)
    assert rates(cfg) == pytest.approx([0.8, 0.6, 0.4, 0.2])
    longer = cfg.replace(**{"trainer.iterations": 8})
    assert rates(longer, last_state(cfg)) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    iteration = ecrl.make_iteration(longer)
    state, logs = iteration(last_state(cfg))
    assert float(logs["train"]["learning_rate"]) == pytest.approx(0.4) and int(state["iterations"]) == 8
    states = torch.stack([last_state(cfg), last_state(cfg.replace(**{"trainer.seed": 2}))])
    _, logs = torch.func.vmap(iteration)(states)
    assert logs["train"]["learning_rate"].tolist() == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize("total", [{}, {"kwargs": {"total_iters": 16}}])
def test_a_run_that_is_resumed_for_longer_has_the_schedule_of_the_new_length(tmp_path, total):
    cfg = small(**LINEAR, **{"trainer.save_freq": 32})
    ecrl.train(init_state(cfg), cfg, tmp_path / "run")
    changes = {"trainer.iterations": 8, "algorithm.cfg.lr_scheduler": {"name": "linear", **total}}
    state, longer = resume(tmp_path / "run", overrides=changes, force=True)
    expected = [0.6, 0.55, 0.5, 0.45] if total else [0.4, 0.3, 0.2, 0.1]
    assert rates(longer, state) == pytest.approx(expected)
    ecrl.train(state, longer, tmp_path / "run")
    back = {"trainer.iterations": 12, "algorithm.cfg.lr_scheduler": {"name": "linear"}}
    state, longest = resume(tmp_path / "run", overrides=back, force=True)
    assert rates(longest, state) == pytest.approx([0.8 * (12 - i) / 12 for i in range(8, 12)])
