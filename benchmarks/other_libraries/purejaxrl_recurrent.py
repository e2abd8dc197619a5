"""Recurrent PPO in JAX, as PureJaxRL computes it (Lu et al. 2022), with flax's GRU and gymnax's CartPole.

Each update is one jitted call: a rollout by `scan`, GAE by a reversed `scan`, then epochs of minibatches of whole
environments. In a minibatch, a `scan` over time recomputes the memory from its value at the start of the rollout.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax
from flax.linen.initializers import constant, orthogonal
from flax.training.train_state import TrainState

from benchmarks.other_libraries import STEPS
from benchmarks.recurrent import EPOCHS, MINIBATCHES, OBSERVED, UNITS

CLIP, GAMMA, LAMBDA, ENTROPY, VALUE, MAX_NORM, LEARNING_RATE = 0.2, 0.99, 0.95, 0.01, 0.5, 0.5, 1e-3


class Memory(nn.Module):
    """A GRU over time, `[T, n, features]`, whose memory is zero where an episode starts."""

    @partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})
    @nn.compact
    def __call__(self, memory: Any, inputs: Any) -> Any:
        """Return the memory after the step, twice: to be carried, and as the output."""
        features, starts = inputs
        memory = jnp.where(starts[:, None], 0.0, memory)
        return nn.GRUCell(features=UNITS)(memory, features)


class ActorCritic(nn.Module):
    """Logits and values of `[T, n]` observations, with one encoder and one memory for both."""

    actions: int

    @nn.compact
    def __call__(self, memory: Any, inputs: Any) -> Any:
        """Return the memory, logits and values."""
        obs, starts = inputs
        dense = partial(nn.Dense, bias_init=constant(0.0))
        features = nn.relu(dense(UNITS, kernel_init=orthogonal(2**0.5))(obs))
        memory, output = Memory()(memory, (features, starts))
        hidden = nn.tanh(dense(UNITS, kernel_init=orthogonal(2**0.5))(output))
        logits = dense(self.actions, kernel_init=orthogonal(0.01))(hidden)
        hidden = nn.tanh(dense(UNITS, kernel_init=orthogonal(2**0.5))(output))
        return memory, logits, dense(1, kernel_init=orthogonal(1.0))(hidden)[..., 0]


class Transition(NamedTuple):
    """A step of a rollout. `start` is True if `obs` is the first observation of its episode."""

    obs: Any
    start: Any
    action: Any
    log_prob: Any
    value: Any
    reward: Any
    done: Any


class Runner(NamedTuple):
    """Everything that an iteration changes. `memory` is the memory before the policy reads `obs`."""

    train: TrainState
    env_state: Any
    obs: Any
    start: Any
    memory: Any
    key: Any


def observed(obs: Any) -> Any:
    """Return the entries that the policy sees."""
    return obs[:, jnp.asarray(OBSERVED)]


def log_prob_of(logits: Any, action: Any) -> Any:
    """Return the log-probability of `action`."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def gae(rollout: Transition, last_value: Any) -> tuple[Any, Any]:
    """Return advantages and returns, `[T, n]`."""

    def step(carry: Any, t: Transition) -> Any:
        trace, next_value = carry
        going = 1.0 - t.done
        trace = t.reward + GAMMA * next_value * going - t.value + GAMMA * LAMBDA * going * trace
        return (trace, t.value), trace

    _, advantage = jax.lax.scan(step, (jnp.zeros_like(last_value), last_value), rollout, reverse=True, unroll=16)
    return advantage, advantage + rollout.value


def loss(params: Any, apply: Any, memory: Any, rollout: Transition, advantage: Any, returns: Any) -> Any:
    """Return PPO's loss of a minibatch, with clipped values as in PureJaxRL."""
    _, logits, value = apply(params, memory, (rollout.obs, rollout.start))
    clipped = rollout.value + jnp.clip(value - rollout.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum((value - returns) ** 2, (clipped - returns) ** 2).mean()
    ratio = jnp.exp(log_prob_of(logits, rollout.action) - rollout.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    return -surrogate + VALUE * value_loss - ENTROPY * entropy


def first_runner(num_envs: int, seed: int) -> tuple[Runner, Any, Any]:
    """Return the first state, the environment and its parameters."""
    env, env_params = gymnax.make("CartPole-v1")
    key, key_net, key_env = jax.random.split(jax.random.PRNGKey(seed), 3)
    network = ActorCritic(env.num_actions)
    memory, start = jnp.zeros((num_envs, UNITS)), jnp.ones(num_envs, dtype=bool)
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key_env, num_envs), env_params)
    obs = observed(obs)
    params = network.init(key_net, memory, (obs[None], start[None]))
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(LEARNING_RATE, eps=1e-5))
    train = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
    return Runner(train, env_state, obs, start, memory, key), env, env_params


def iteration(runner: Runner, env: Any, env_params: Any) -> tuple[Runner, Transition]:
    """Return the state after one rollout and its updates, and the rollout."""
    first, num_envs = runner.memory, runner.obs.shape[0]

    def act(runner: Runner, _: Any) -> tuple[Runner, Transition]:
        key, key_action, key_step = jax.random.split(runner.key, 3)
        memory, logits, value = runner.train.apply_fn(
            runner.train.params, runner.memory, (runner.obs[None], runner.start[None])
        )
        action = jax.random.categorical(key_action, logits[0])
        obs, env_state, reward, done, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            jax.random.split(key_step, num_envs), runner.env_state, action, env_params
        )
        step = Transition(runner.obs, runner.start, action, log_prob_of(logits[0], action), value[0], reward, done)
        return Runner(runner.train, env_state, observed(obs), done, memory, key), step

    runner, rollout = jax.lax.scan(act, runner, None, STEPS)
    _, _, last_value = runner.train.apply_fn(runner.train.params, runner.memory, (runner.obs[None], runner.start[None]))
    advantage, returns = gae(rollout, last_value[0])

    def minibatch(train: TrainState, batch: Any) -> tuple[TrainState, None]:
        memory, *rest = batch
        gradient = jax.grad(loss)(train.params, train.apply_fn, memory[0], *rest)
        return train.apply_gradients(grads=gradient), None

    def epoch(carry: Any, _: Any) -> tuple[Any, None]:
        train, key = carry
        key, key_order = jax.random.split(key)
        order = jax.random.permutation(key_order, num_envs)

        def split(x: Any) -> Any:
            x = jnp.take(x, order, axis=1).reshape(x.shape[0], MINIBATCHES, -1, *x.shape[2:])
            return jnp.swapaxes(x, 0, 1)

        batches = jax.tree.map(split, (first[None], rollout, advantage, returns))
        train, _ = jax.lax.scan(minibatch, train, batches)
        return (train, key), None

    (train, key), _ = jax.lax.scan(epoch, (runner.train, runner.key), None, EPOCHS)
    return runner._replace(train=train, key=key), rollout


def make(num_envs: int, seed: int = 0) -> Callable[[], int]:
    """Return a function that runs several iterations in one compiled call, which takes some tenths of a second."""
    runner, env, env_params = first_runner(num_envs, seed)
    times = max(1, 200 // num_envs)
    iterate = jax.jit(
        lambda r: jax.lax.fori_loop(0, times, lambda _, r: iteration(r, env, env_params)[0], r), donate_argnums=0
    )
    runner = jax.block_until_ready(iterate(runner))

    def work() -> int:
        nonlocal runner
        runner = jax.block_until_ready(iterate(runner))
        return times * num_envs * STEPS

    return work
