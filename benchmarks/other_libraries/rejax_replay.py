"""rejax's DQN, TD3, SAC and PQN on gymnax's environments, in a jitted loop over its `train_iteration`.

rejax 0.1.3 draws a minibatch without replacement from an array of probabilities, which takes time proportional to the
capacity of the buffer. `constant_time` replaces this by uniform draws with replacement, as ecrl and
Stable-Baselines3 draw.
"""

from collections.abc import Callable
from typing import Any

import jax
import rejax
from rejax import buffers

from benchmarks.off_policy import BATCH, GAMMA, LEARNING_RATE, LEARNING_STARTS, PQN, TASK


def _sample(self: Any, num: int, rng: Any) -> Any:
    index = jax.random.randint(rng, (num,), 0, self.num_entries)
    return jax.tree.map(lambda field: field[index], self.data)


def algorithm(name: str, units: int, capacity: int) -> Any:
    """Return the algorithm with the settings that all libraries share."""
    settings: dict[str, Any] = {
        "learning_rate": LEARNING_RATE,
        "gamma": GAMMA,
        "max_grad_norm": 10.0,  # of each element: rejax has no clipping by the global norm
        "total_timesteps": 10**9,
        "eval_freq": 10**9,
    }
    if name == "pqn":
        sizes = {"num_envs": PQN.num_envs, "num_steps": PQN.steps, "num_epochs": PQN.epochs}
        sizes["num_minibatches"] = PQN.num_envs * PQN.steps // PQN.batch_size
        return rejax.PQN.create(env=f"{TASK[name]}-v1", td_lambda=PQN.q_lambda, **sizes, **settings)
    settings |= {"num_envs": 1, "buffer_size": capacity, "fill_buffer": LEARNING_STARTS, "batch_size": BATCH}
    settings |= {"polyak": 0.995}
    if name == "sac":
        settings |= {"agent_kwargs": {"activation": "relu"}, "hidden_layer_sizes": (units, units)}
        return rejax.SAC.create(env=f"{TASK[name]}-v1", **settings)
    if units != 64:
        raise ValueError(f"rejax has no setting for the units of {name}: it always uses 64")
    if name == "td3":
        activation = {f"{network}_kwargs": {"activation": "relu"} for network in ("actor", "critic")}
        return rejax.TD3.create(env=f"{TASK[name]}-v1", **activation, **settings)
    return rejax.DQN.create(env=f"{TASK[name]}-v1", agent_kwargs={"activation": "relu"}, **settings)


def make(name: str, units: int, capacity: int, constant_time: bool, seed: int = 0) -> Callable[[], int]:
    """Return a function that runs 100 iterations, or one of PQN, in one compiled call, and returns their steps."""
    if constant_time:
        buffers.ReplayBuffer.sample = _sample
    trained, times = algorithm(name, units, capacity), 1 if name == "pqn" else 100
    steps = PQN.num_envs * PQN.steps if name == "pqn" else trained.num_envs * getattr(trained, "policy_delay", 1)
    iterate = jax.jit(
        lambda state: jax.lax.fori_loop(0, times, lambda _, s: trained.train_iteration(s), state), donate_argnums=0
    )
    state = jax.jit(trained.init_state)(jax.random.PRNGKey(seed))

    def work() -> int:
        nonlocal state
        state = jax.block_until_ready(iterate(state))
        return times * steps

    done = 0
    while done <= LEARNING_STARTS:
        done += work()
    return work
