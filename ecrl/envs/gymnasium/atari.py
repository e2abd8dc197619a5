"""Settings of the usual preprocessing of Atari games, and values that follow from them, such as the truncation gap."""

from typing import Any

from gymnasium.envs.registration import EnvSpec
from pydantic import Field

from ecrl.config.model import ConfigModel, Count, Natural, format_value
from ecrl.envs.core import NEVER

FRAME_STACK = 4
"""Number of latest images that the policy sees in an Atari game, unless the config sets `env.frame_stack`."""


class AtariConfig(ConfigModel):
    """Preprocessing of an Atari game. The defaults are the usual settings, as in Stable-Baselines3's AtariWrapper."""

    noop_max: Natural = Field(30, description="a game begins with 1 to noop_max no-ops, drawn at random; 0 for none")
    frame_skip: Count = Field(
        4, description="frames per step; if above 1, an image is the pixelwise maximum of the last two frames"
    )
    screen_size: Count = Field(84, description="height and width of the images, pixels")
    grayscale_obs: bool = Field(True, description="images have one grey channel instead of three colors")
    terminal_on_life_loss: bool = Field(
        True, description="an episode ends if a life is lost, and the next episode continues the game"
    )
    fire_on_reset: bool = Field(True, description="an episode begins with FIRE if the game has this action")
    clip_reward: bool = Field(True, description="replace each reward by its sign: -1, 0 or 1")


def base_kwargs(cfg: AtariConfig) -> dict[str, Any]:
    """Return the arguments of `gymnasium.make` that the preprocessing sets."""
    return {"frameskip": 1, "obs_type": "grayscale" if cfg.grayscale_obs else "rgb"}


def check_kwargs(cfg: AtariConfig, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if an argument of `gymnasium.make` contradicts the preprocessing."""
    advice = {"frameskip": ", and set atari.frame_skip", "obs_type": ", and set atari.grayscale_obs"}
    for name, needed in (base_kwargs(cfg) | {"continuous": False, "sound_obs": False}).items():
        if name in kwargs and kwargs[name] != needed:
            text = f"kwargs.{name} is {format_value(kwargs[name])}, but atari needs {format_value(needed)}"
            raise ValueError(f"{text}; remove it{advice.get(name, ', or remove atari')}")


def truncation_gap(spec: EnvSpec, kwargs: dict[str, Any], cfg: AtariConfig) -> int:
    """Return the smallest number of the agent's steps after which a game may be truncated, or `NEVER`.

    A game is truncated at frame `max_num_frames_per_episode`, which is 108,000 in the registered games. If
    `max_episode_steps` is set, a game is also truncated at this step. The start of a game takes at most `noop_max`
    frames. An episode that continues the game begins with a no-op. FIRE adds up to four steps to an episode: FIRE, the
    action after FIRE, and a no-op after each of these two actions if the action loses a life. The agent chooses none of
    these steps.
    """
    fire = 4 * cfg.fire_on_reset
    step = 1 + (1 + fire) * cfg.terminal_on_life_loss
    frames = (spec.kwargs | kwargs).get("max_num_frames_per_episode") or 0
    limit = kwargs.get("max_episode_steps") or 0
    gaps = [((frames - cfg.noop_max) // cfg.frame_skip, frames), (limit, limit)]
    return min((max(1, (steps - fire) // step) for steps, given in gaps if given > 0), default=NEVER)
