"""rejax's PPO on ecrl's MinAtar games, with the settings of a shipped config.

gymnax's games never repeat an action at random, so scores on them would not be comparable. Instead, rejax's compiled
loop calls ecrl's game on the host in every step. rejax has the budget, the sizes of the networks and the settings of
the config, whose learning rate was chosen with ecrl. rejax differs in these points:

- Actor and critic have one optimiser each. Initial weights are not orthogonal.
- Each element of a gradient is clipped instead of the global norm.
- The change of the critic's values is clipped, and the critic's loss has a factor of one half.
- Advantages are standardised over each minibatch, instead of over each rollout.
- A time limit ends an episode as a termination does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rejax
import torch
from gymnax.environments import spaces
from gymnax.environments.environment import Environment
from tensordict import TensorDict

from benchmarks.learning import Report, Row, followed
from benchmarks.other_libraries.rejax_minatar import CNNPolicy, CNNValue
from benchmarks.tasks import task_of
from ecrl import Config, load_config, rng
from ecrl.config import total_steps
from ecrl.envs import Env, auto_reset, make_env

Arrays = dict[str, Any]


class HostGame(Environment):
    """A game of ecrl as an environment of gymnax. The state is a dict of arrays."""

    def __init__(self, env: Env):
        self.env, self.playing = env, auto_reset(env)
        self.compiled_step = torch.compile(self.playing.step, dynamic=False)
        start = self.playing.reset(torch.zeros(1, dtype=torch.int64))
        self.dtypes = {name: leaf.dtype for name, leaf in start.items()}
        self.shapes = {name: jax.ShapeDtypeStruct(leaf.shape[1:], _array(leaf).dtype) for name, leaf in start.items()}

    def step(self, key: Any, state: Any, action: Any, params: Any = None) -> Any:
        """Take a step. The step that ends an episode also begins the next one."""
        after = jax.pure_callback(self.host_step, self.shapes, key, state, action, vmap_method="broadcast_all")
        return _obs(after), after, after["reward"], after["terminated"] | after["truncated"], {}

    def reset(self, key: Any, params: Any = None) -> Any:
        """Begin an episode."""
        state = jax.pure_callback(self.host_reset, self.shapes, key, vmap_method="broadcast_all")
        return _obs(state), state

    def host_reset(self, keys: Any) -> Arrays:
        """Begin episodes, one per key `[*B, 2]`."""
        return _arrays(self.playing.reset(_keys(keys)))

    def host_step(self, keys: Any, state: Arrays, action: Any) -> Arrays:
        """Take a step of each environment."""
        leaves = {name: torch.tensor(np.asarray(leaf), dtype=self.dtypes[name]) for name, leaf in state.items()}
        before, noise = TensorDict(leaves, np.shape(action)), self.playing.draw(_keys(keys))
        return _arrays(self.compiled_step(before, torch.tensor(np.asarray(action), dtype=torch.int64), noise))

    def action_space(self, params: Any = None) -> Any:
        """Return the space of actions."""
        return spaces.Discrete(self.env.action_space.n)

    def observation_space(self, params: Any = None) -> Any:
        """Return the space of images, which are floats here."""
        return spaces.Box(0.0, 1.0, self.env.observation_space.shape, jnp.float32)


def _obs(state: Arrays) -> Any:
    return state["obs"].astype(jnp.float32)


def _array(leaf: torch.Tensor) -> np.ndarray:
    """Convert a tensor to an array; JAX has no int64 by default, and no number of a game needs it."""
    return (leaf.to(torch.int32) if leaf.dtype == torch.int64 else leaf).numpy()


def _arrays(state: TensorDict) -> Arrays:
    return {name: _array(leaf) for name, leaf in state.items()}


def _keys(keys: Any) -> torch.Tensor:
    """Convert JAX's keys, two words each, to ecrl's.

    >>> _keys(np.array([[1, 2]], dtype=np.uint32)).tolist() == [2**32 + 2]
    True
    """
    words = np.asarray(keys).astype(np.int64)
    return torch.from_numpy((words[..., 0] << 32) | words[..., 1])


def ppo(cfg: Config, game: HostGame) -> rejax.PPO:
    """Return rejax's PPO with the settings of a config."""
    numbers: Any = cfg.algorithm.cfg
    rollout = cfg.trainer.num_envs * cfg.trainer.buffer_size
    minibatches = rollout // numbers.batch_size
    updates = cfg.trainer.iterations * numbers.n_epochs * minibatches
    algorithm = rejax.PPO.create(
        env=game,
        env_params=None,
        num_envs=cfg.trainer.num_envs,
        num_steps=cfg.trainer.buffer_size,
        num_epochs=numbers.n_epochs,
        num_minibatches=minibatches,
        learning_rate=optax.linear_schedule(numbers.learning_rate, 0.0, updates),
        max_grad_norm=numbers.max_grad_norm,
        gamma=numbers.gamma,
        gae_lambda=numbers.gae_lambda,
        clip_eps=numbers.clip_coef,
        ent_coef=numbers.ent_coef,
        vf_coef=numbers.vf_coef,
        total_timesteps=rollout * cfg.trainer.iterations,
    )
    return algorithm.replace(actor=CNNPolicy(algorithm.actor.action_dim, (), jax.nn.relu), critic=CNNValue())


class Evaluation:
    """Evaluation over episodes with the most probable actions, one per environment, outside of rejax's loop."""

    def __init__(self, algorithm: rejax.PPO, env: Env):
        self.env, self.compiled_step = env, torch.compile(env.step, dynamic=False)

        def choose(params: Any, obs: Any) -> Any:
            return algorithm.actor.apply(params, obs.astype(jnp.float32), method="_action_dist").mode()

        self.choose = jax.jit(choose)

    def __call__(self, params: Any, seed: int, episodes: int) -> Row:
        """Return the mean return."""
        key = rng.key(seed)
        state = self.env.reset(rng.split(rng.fold_in(key, rng.START), episodes))
        total, running = torch.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
        step = 0
        while running.any():
            action = torch.tensor(np.asarray(self.choose(params, state["obs"].numpy())), dtype=torch.int64)
            keys = rng.split(rng.fold_in(rng.fold_in(key, rng.ENV), step), episodes)
            state = self.compiled_step(state, action, self.env.draw(keys))
            total += torch.where(running, state["reward"], 0.0)
            running &= ~(state["terminated"] | state["truncated"])
            step += 1
        return {"return": float(total.mean())}


def learn(config: str, seed: int, started: float | None = None) -> Row:
    """Train with a config's settings for its whole budget and return the learning curve."""
    cfg = load_config(config)
    env = make_env(cfg.env)
    algorithm = ppo(cfg, HostGame(env))
    evaluate = Evaluation(algorithm, env)

    def train(report: Report) -> None:
        iterate = jax.jit(algorithm.train_iteration)
        state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(seed))
        for number in range(1, cfg.trainer.iterations + 1):
            state = jax.block_until_ready(iterate(state))

            def scores(episodes: int, params: Any = state.actor_ts.params) -> Row:
                return evaluate(params, seed + 10_000, episodes)

            report(number * cfg.trainer.num_envs * cfg.trainer.buffer_size, scores)

    return followed(train, task_of(config), total_steps(cfg, 1), started)
