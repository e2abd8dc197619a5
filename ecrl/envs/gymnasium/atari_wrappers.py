"""Wrap Atari environments as in the DQN paper, with Gymnasium's AtariPreprocessing and wrappers as in OpenAI Baselines.

A worker process loads this file without its package, so the file does not import ecrl.

Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning"; the wrappers of OpenAI Baselines,
as in `stable_baselines3.common.atari_wrappers`.
"""

import inspect
import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, TimeLimit, TransformReward

_FRAMES_PER_SECOND = 60.0  # of the Atari 2600


class _Game(gymnasium.Wrapper):
    """Sum the rewards of each game. This is the innermost wrapper, so it receives every frame and every reset."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._scores = [0.0]  # one score per game since the last `take_score`; the last is of the current game

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._scores.append(0.0)
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._scores[-1] += float(result[1])
        return result

    def take_score(self) -> float:
        """Return the score of the game that ended since the last call, or NaN if no game ended."""
        first, *rest = self._scores
        self._scores = self._scores[-1:]
        return first if rest else math.nan


class _ReportScore(gymnasium.Wrapper):
    """Add the score of each finished game to `info`, as `info[key]`. This wrapper is the outermost wrapper.

    Only `reset` reports scores, because a game can also end in the steps that a reset takes. `step` reports NaN, and so
    does a reset with a seed.
    """

    def __init__(self, env: gymnasium.Env, game: _Game, key: str, frame_skip: int):
        super().__init__(env)
        self._game, self._key = game, key
        self.metadata = env.metadata | {"render_fps": _FRAMES_PER_SECOND / frame_skip}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        score = self._game.take_score()
        return obs, info | {self._key: score if seed is None else math.nan}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, info | {self._key: math.nan}


class _EpisodicLife(gymnasium.Wrapper):
    """End the episode if a life is lost. The next episode continues the game with one no-op, unless the game is over.

    AtariPreprocessing can also end the episode if a life is lost, but its next episode is always a new game. The agent
    would then see only the first life. A reset with a seed starts a new game.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._lives, self._game_over = 0, True

    def _count_lives(self) -> int:
        return self.env.unwrapped.ale.lives()  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        before, self._lives, self._game_over = self._lives, self._count_lives(), terminated or truncated
        lost = 0 < self._lives < before  # Qbert has 0 lives for a few frames before the game is over
        return obs, reward, terminated or lost, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        new_game = self._game_over or seed is not None
        if not new_game:
            obs, _, terminated, truncated, info = self.env.step(0)
            new_game = terminated or truncated
        if new_game:
            obs, info = self.env.reset(seed=seed, options=options)
        self._lives = self._count_lives()
        return obs, info  # pyright: ignore[reportPossiblyUnboundVariable]


class _FireReset(gymnasium.Wrapper):
    """Take action 1, which is FIRE, and then action 2 at the start of each episode. Some games wait for FIRE."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        for action in (1, 2):
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


def check_is_atari(creator: Any) -> None:
    """Raise TypeError unless the function that creates an environment has the argument `frameskip` of Atari games."""
    if "frameskip" not in inspect.signature(creator).parameters:
        raise TypeError(
            f"{creator.__name__} has no argument frameskip, so it is not an Atari game; remove env.cfg.atari"
        )


def preprocess(
    env: gymnasium.Env,
    max_episode_steps: int | None,
    score_key: str,
    *,
    noop_max: int,
    frame_skip: int,
    screen_size: int,
    grayscale_obs: bool,
    terminal_on_life_loss: bool,
    fire_on_reset: bool,
    clip_reward: bool,
) -> gymnasium.Env:
    """Wrap an Atari environment that does not skip frames.

    The wrappers are applied in the order of Stable-Baselines3's AtariWrapper: no-ops, frame skip, lives, FIRE, clipped
    rewards. After a reset without a seed, `info[score_key]` is the score of the game that ended since the last reset,
    or NaN if no game ended. After any other reset and after a step, `info[score_key]` is NaN. `max_episode_steps`
    limits the steps of a game, including the actions that `_EpisodicLife` and `_FireReset` take.
    `ecrl.envs.gymnasium.AtariConfig` describes the other arguments.
    """
    game = _Game(env)
    wrapped: gymnasium.Env = AtariPreprocessing(
        game, noop_max, frame_skip, screen_size, grayscale_obs=grayscale_obs, grayscale_newaxis=True
    )
    if max_episode_steps is not None and max_episode_steps > 0:
        wrapped = TimeLimit(wrapped, max_episode_steps)
    if terminal_on_life_loss:
        wrapped = _EpisodicLife(wrapped)
    if fire_on_reset and has_fire(env):
        wrapped = _FireReset(wrapped)
    if clip_reward:
        wrapped = TransformReward(wrapped, lambda reward: np.sign(float(reward)))
    return _ReportScore(wrapped, game, score_key, frame_skip)


def has_fire(env: gymnasium.Env) -> bool:
    """Return True if the second action of a game is FIRE and a third action exists."""
    meanings: list[str] = env.unwrapped.get_action_meanings()  # pyright: ignore[reportAttributeAccessIssue]
    return len(meanings) >= 3 and meanings[1] == "FIRE"
