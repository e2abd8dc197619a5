"""rejax's PPO on gymnax's CartPole, in a jitted loop over its `train_iteration`."""

from collections.abc import Callable

import jax
import rejax

from benchmarks.other_libraries import STEPS, iterations_per_call


def ppo(num_envs: int, **changes: object) -> rejax.PPO:
    """Return the algorithm with the settings that all libraries share; `changes` are further arguments of `create`."""
    settings = {
        "num_steps": STEPS,
        "num_epochs": 4,
        "num_minibatches": 4,
        "learning_rate": 1e-3,
        "agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        "max_grad_norm": 0.5,  # of each element: rejax has no clipping by the global norm
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "total_timesteps": 10**9,
        "eval_freq": 10**9,
    }
    return rejax.PPO.create(env="CartPole-v1", num_envs=num_envs, **{**settings, **changes})


def make(num_envs: int, seed: int = 0) -> Callable[[], int]:
    """Return a function that runs several iterations in one compiled call, which takes some tenths of a second."""
    algorithm, times = ppo(num_envs), iterations_per_call(num_envs)
    iterate = jax.jit(lambda state: jax.lax.fori_loop(0, times, lambda _, s: algorithm.train_iteration(s), state))
    state = jax.block_until_ready(iterate(jax.jit(algorithm.init_state)(jax.random.PRNGKey(seed))))

    def work() -> int:
        nonlocal state
        state = jax.block_until_ready(iterate(state))
        return times * num_envs * STEPS

    return work
