"""A small value-based agent: it acts by its own Q values with random actions in between, and learns from a ring.

The policy `replay_q` has one Q network. The algorithm `replay_td` learns one-step targets with a slow copy of it.
A padding field makes the steps, and so the buffer, as large as a test wants.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict

from ecrl import rng
from ecrl.algorithms import Algorithm, interleaved
from ecrl.algorithms.core import LEARNER_KINDS, Run, Static, learn
from ecrl.algorithms.interleaved import REPLAY_KINDS, new_replay, sample_keys, store, take_steps
from ecrl.algorithms.minibatch_sgd import SGD, minibatch_sgd
from ecrl.algorithms.optimizer import groups_of, learning_state
from ecrl.algorithms.optimizer_config import LearningConfig
from ecrl.algorithms.state_kinds import Kind
from ecrl.config import Config, PolicyConfig, config_from_dict
from ecrl.config.model import Count, Fraction
from ecrl.kernels import Replay, replay_index, replay_read
from ecrl.policies import Policy, acting_params, fixed_params
from ecrl.policies.networks import NetworkConfig, make_network, seeded
from ecrl.pytree import mapped, replaced
from ecrl.registry import register_algorithm, register_policy
from ecrl.types import Logs
from support.small_runs import NET

KINDS = {**LEARNER_KINDS, **REPLAY_KINDS, "target_params": Kind.LEARNED}


class QConfig(PolicyConfig):
    """The Q network."""

    critic: NetworkConfig = Field(description="network with one output for each action")


@register_policy("replay_q", override=True)
def replay_q(cfg: QConfig, observation_space: Any, action_space: Any) -> Policy:
    """Take the action of the largest Q; explore by a random action with probability `exploration["epsilon"]`."""
    network = make_network(cfg.critic, observation_space, action_space.n, cfg.bf16, "policy.critic")

    def init(key):
        with seeded(key):
            return TensorDict({"critic": network.init()}, []).to(key.device)

    def draw(keys):
        coin, action = rng.split(keys)
        random = rng.randint(action, low=0, high=action_space.n)
        return TensorDict({"coin": rng.uniform(coin), "action": random}, keys.shape)

    def q(params, obs, action, noise):
        values = network.forward(params["critic"], obs).unsqueeze(0)
        return values if action is None else values.gather(-1, action.expand(values.shape[:-1]).unsqueeze(-1))[..., 0]

    def act(params, carry, obs, noise):
        action = q(params, obs, None, None)[0].argmax(-1)
        return carry, TensorDict({"action": action}, action.shape)

    def explore(params, exploration, out, noise):
        is_random = noise["coin"] < exploration["epsilon"]
        return exploration, out.copy().update({"action": torch.where(is_random, noise["action"], out["action"])})

    return Policy(init, draw, act, None, None, explore=explore, q=q)


class ReplayTDConfig(LearningConfig):
    """Hyperparameters."""

    gamma: Fraction = Field(default=0.9, description="discount per step")
    tau: Fraction = Field(default=0.05, description="share of the new weights in those of the targets, per turn")
    epsilon: Fraction = Field(default=0.1, description="share of random actions in the end")
    exploration_steps: Count = Field(default=1, description="environment steps until that share")
    capacity: Count = Field(default=256, description="steps in the buffer, of all environments")
    chunks: bool = Field(default=False, description="actions of the environment take several steps")
    padding: Count = Field(default=1, description="bytes that a step has for nothing")
    n: Count = Field(default=1, description="steps of a return")
    batch_size: Count = Field(default=64, description="rows of a gradient step")
    learning_starts: int = Field(default=0, description="environment steps before the first gradient step")
    train_freq: Count = Field(default=1, description="steps of each environment in a turn")
    gradient_steps: Count = Field(default=1, description="gradient steps of a turn")


class Choices(NamedTuple):
    """Sizes that shape the graph."""

    padding: int
    rows: int
    n: int
    sgd: SGD


def init(cfg: ReplayTDConfig, run: Run, key: torch.Tensor) -> dict[str, Any]:
    """Parameters, optimiser state, numbers, share of random actions, and an empty buffer."""
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    numbers = {name: getattr(cfg, name) for name in ("gamma", "tau", "epsilon", "exploration_steps")}
    fields = {"padding": torch.zeros(run.static.num_envs, cfg.padding, dtype=torch.uint8)}
    fields |= {"executed": torch.zeros(run.static.num_envs, dtype=torch.int64)} if cfg.chunks else {}
    return learning_state(cfg, params, numbers, key.device) | {
        "target_params": params.clone(),
        "exploration": TensorDict({"epsilon": torch.ones(run.static.num_envs, device=key.device)}),
        "replay": new_replay(run, cfg.capacity, key.device, **fields),
    }


def phase(cfg: ReplayTDConfig, sample_step: int) -> str:
    """Collect until `learning_starts`, then learn."""
    return "learn" if sample_step >= cfg.learning_starts else "collect"


def with_epsilon(state: TensorDict) -> TensorDict:
    """Let the share of random actions fall from 1 to its end, in proportion to the steps."""
    hyper = cast(TensorDict, state["hyper"])
    epsilon: Any = 1.0 + (hyper["epsilon"] - 1.0) * (state["sample_step"] / hyper["exploration_steps"]).clamp(max=1.0)
    every = epsilon.expand(state["exploration", "epsilon"].shape).clone()
    return replaced(state, {"exploration": TensorDict({"epsilon": every})})


def stored(run: Run, replay: Replay, steps: TensorDict, padding: int) -> Replay:
    """The buffer with the steps of a turn."""
    blank = torch.zeros(*steps.shape, padding, dtype=torch.uint8, device=steps["reward"].device)
    return store(run, replay, steps, padding=blank)


def td_loss(run: Run, params: TensorDict, batch: TensorDict, mask: torch.Tensor, hyper: TensorDict) -> Any:
    """Squared distance of Q from its target."""
    q = cast(Any, run.policy.q)(params, batch["obs"], batch["action"], None)[0]
    return (q - batch["target"]).square().masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1), {}


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Gradient steps towards reward + discount * max_a Q'(next_obs, a), and the slow copy Q' follows."""
    slow, q = acting_params(cast(TensorDict, state["target_params"]), fixed_params(state)), cast(Any, run.policy.q)
    after = q(slow, batch["next_obs"], None, None)[0].amax(-1)
    target = batch["reward"] + batch["discount"] * after
    state, logs = minibatch_sgd(run, state, batch.copy().update({"target": target}), td_loss, run.algorithm.choices.sgd)
    tau = state["hyper", "tau"]
    slow = mapped(lambda old, new: old + tau * (new - old), state["target_params"], state["params"])
    return replaced(state, {"target_params": slow}), logs


def turn(run: Run, state: TensorDict, noise: Any, replay: Replay) -> tuple[TensorDict, Replay, TensorDict, Logs]:
    """Step, store, sample and learn."""
    choices = run.algorithm.choices
    state, steps = take_steps(run, with_epsilon(state), noise)
    replay = stored(run, replay, steps, choices.padding)
    if run.static.phase == "collect":
        return state, replay, steps, {}
    index = replay_index(replay, sample_keys(run, state, choices.rows), n=choices.n, stack=1)
    batch = replay_read(replay, index, gamma=state["hyper", "gamma"], n=choices.n)
    state, logs = learn(update, run, state, batch)
    return state, replay, steps, logs


def gradient_steps(cfg: ReplayTDConfig, static: Static) -> int:
    """Gradient steps of an iteration."""
    return static.buffer_size // cfg.train_freq * cfg.gradient_steps


@register_algorithm("replay_td", override=True)
def replay_td(cfg: ReplayTDConfig) -> Algorithm:
    """Q-learning from a replay buffer."""
    sgd = SGD(1, cfg.batch_size, None, groups_of(cfg))
    return Algorithm(
        choices=Choices(cfg.padding, cfg.batch_size * cfg.gradient_steps, cfg.n, sgd),
        init=partial(init, cfg),
        iterate=interleaved(turn, cfg.train_freq),
        kinds=KINDS,
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
        phase=partial(phase, cfg),
    )


N, T, CAPACITY = 3, 4, 21


def replaying(**changes) -> Config:
    """A small run of the agent on CartPole, eager, with dotted keys changed."""
    algorithm = {"capacity": CAPACITY, "batch_size": 16, "learning_rate": 0.02}
    base = {
        "trainer": {"num_envs": N, "buffer_size": T, "iterations": 5, "compile": "off"},
        "env": {"name": "cartpole"},
        "policy": {"name": "replay_q", "critic": NET},
        "algorithm": {"name": "replay_td", "cfg": algorithm},
    }
    return config_from_dict(base).replace(**changes)
