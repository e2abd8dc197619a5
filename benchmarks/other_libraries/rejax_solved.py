"""Time until rejax has solved CartPole with the settings of `benchmarks/cartpole_speed.json`.

rejax does not report a running average. Therefore the last 100 episodes are stored with its state, as in ecrl.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rejax
from rejax.algos.algorithm import register_init

from benchmarks.other_libraries import SOLVED, STEPS

WINDOW = 100


class Windowed(rejax.PPO):
    """PPO that keeps the returns of its last 100 episodes. Each reward is 1, so a return is the episode's length."""

    @register_init
    def initialize_window(self, rng: Any) -> dict[str, Any]:
        """Return the fields of the state for the episodes, before any episode has ended."""
        return {"length": jnp.zeros(self.num_envs), "window": jnp.full(WINDOW, jnp.nan)}

    def collect_trajectories(self, ts: Any) -> Any:
        """Collect a rollout, and add the returns of the episodes that ended in it to the window."""
        ts, trajectories = super().collect_trajectories(ts)

        def step(length: Any, done: Any) -> tuple[Any, Any]:
            return jnp.where(done, 0.0, length + 1), jnp.where(done, length + 1, jnp.nan)

        length, ended = jax.lax.scan(step, ts.length, trajectories.done)
        known = jnp.concatenate([ts.window, ended.flatten()])
        last = jnp.argsort(jnp.where(jnp.isnan(known), -1, jnp.arange(len(known))))[-WINDOW:]
        return ts.replace(length=length, window=known[last]), trajectories


def solve(seed: int, started: float, num_envs: int, batch_size: int, n_epochs: int, iterations: int) -> dict[str, Any]:
    """Train for the whole budget; return the seconds from `started` until CartPole was solved, and until the end."""
    minibatches = num_envs * STEPS // batch_size
    algorithm = Windowed.create(
        env="CartPole-v1",
        num_envs=num_envs,
        num_steps=STEPS,
        num_epochs=n_epochs,
        num_minibatches=minibatches,
        learning_rate=optax.linear_schedule(1e-3, 0.0, iterations * n_epochs * minibatches),
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        max_grad_norm=0.5,
        gamma=0.99,
        gae_lambda=0.95,
        ent_coef=0.01,
        vf_coef=0.5,
    )
    iterate, state = jax.jit(algorithm.train_iteration), jax.jit(algorithm.init_state)(jax.random.PRNGKey(seed))
    solved, steps = None, 0
    for number in range(iterations):
        state = iterate(state)
        window = np.asarray(state.window)
        if solved is None and np.mean(window[~np.isnan(window)]) >= SOLVED:
            solved, steps = time.time() - started, (number + 1) * num_envs * STEPS
    return {"solved_s": solved, "steps": steps, "budget_s": time.time() - started, "form": "jitted"}
