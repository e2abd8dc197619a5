"""rejax's PPO on gymnax's MinAtar, with its own perceptron or with a small CNN, in a jitted loop."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import rejax
from rejax.networks import DiscretePolicy

from benchmarks.minatar import GAMES, SIZES, config
from benchmarks.other_libraries import STEPS


class CNN(nn.Module):
    """A convolution and a layer, with relu.

    The convolution is a product with all windows of the image, because XLA computes the gradient of `flax.linen.Conv`
    slowly inside a `scan` on a CPU.
    """

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return the features of images `[B, h, w, c]`."""
        height, width, offsets = x.shape[1] - SIZES.kernel + 1, x.shape[2] - SIZES.kernel + 1, range(SIZES.kernel)
        windows = jnp.concatenate([x[:, i : i + height, j : j + width] for i in offsets for j in offsets], -1)
        x = nn.relu(nn.Dense(SIZES.channels)(windows))
        return nn.relu(nn.Dense(SIZES.features)(x.reshape((x.shape[0], -1))))


class CNNPolicy(DiscretePolicy):
    """rejax's policy with a CNN in place of its perceptron, whose settings are ignored."""

    def setup(self) -> None:
        """Make the layers."""
        self.features = CNN()
        self.action_logits = nn.Dense(self.action_dim)


class CNNValue(nn.Module):
    """Values of images."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return values `[B]`."""
        return nn.Dense(1)(CNN()(x)).squeeze(1)


def ppo(game: str, kind: str) -> rejax.PPO:
    """Return the algorithm with the settings of ecrl's config."""
    algorithm = rejax.PPO.create(
        env=GAMES[game],
        num_envs=SIZES.num_envs,
        num_steps=STEPS,
        num_epochs=SIZES.epochs,
        num_minibatches=SIZES.minibatches,
        learning_rate=config(game, kind).algorithm.cfg.learning_rate,
        agent_kwargs={"activation": "relu", "hidden_layer_sizes": SIZES.units},
        max_grad_norm=0.5,  # of each element: rejax has no clipping by the global norm
        gamma=0.99,
        gae_lambda=0.95,
        ent_coef=0.01,
        vf_coef=0.5,
        total_timesteps=10**9,
        eval_freq=10**9,
    )
    if kind == "cnn":
        algorithm = algorithm.replace(actor=CNNPolicy(algorithm.actor.action_dim, (), nn.relu), critic=CNNValue())
    return algorithm


def make(game: str, kind: str, seed: int = 0) -> Callable[[], int]:
    """Return a function that runs one iteration in one compiled call, and returns its number of environment steps."""
    algorithm = ppo(game, kind)
    iterate = jax.jit(algorithm.train_iteration, donate_argnums=0)
    state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(seed))
    for _ in range(2):  # the second call may compile again, because types of the first state differ
        state = jax.block_until_ready(iterate(state))

    def work() -> int:
        nonlocal state
        state = jax.block_until_ready(iterate(state))
        return SIZES.num_envs * STEPS

    return work
