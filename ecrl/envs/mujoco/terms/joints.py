"""Terms about one joint of the scene, such as the slide of a drawer."""

from math import isinf

from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.terms.term import Observe, Reward, new_entry
from ecrl.errors import ConfigError
from ecrl.registry import register_observation, register_reward


class SceneJointConfig(ConfigModel):
    """Settings of a term about a joint of the scene."""

    joint: str = Field(min_length=1, description="name of a hinge or slide with limits in the MJCF scene; see mjcf")


def opening_of(sim: Simulation, worlds: TensorDict, joint: str) -> Tensor:
    """Return the position of a joint as a fraction of its range, `[*B]`: 0 at the lower and 1 at the upper limit.

        opening = (q - low) / (high - low)

    Raises: ConfigError if the joint is not a hinge or slide of the scene, or has no limits.
    """
    (low,), (high,) = world.joint_limits(sim, (joint,))
    if isinf(low) or isinf(high):
        raise ConfigError(f"joint {joint!r} has no limits, but its opening needs them; give it a range")
    return (world.joint_positions(sim, worlds, (joint,))[..., 0] - low) / (high - low)


def _checked(cfg: SceneJointConfig, sim: Simulation) -> str:
    try:
        world.joint_limits(sim, (cfg.joint,))
    except ConfigError as error:
        raise ConfigError(f"params.joint: {error}") from None
    return cfg.joint


@register_observation("get_joint_opening")
def get_joint_opening(cfg: SceneJointConfig, sim: Simulation) -> Observe:
    """Observe the position of a joint as a fraction of the joint's range, `[*B, 1]`. Requires `mode: "add"`.

        opening = (q - low) / (high - low)

    The opening is 0 at the lower limit and 1 at the upper limit.
    """
    joint = _checked(cfg, sim)
    return lambda state, value: new_entry(value, opening_of(sim, state["world"], joint).unsqueeze(-1))


@register_reward("joint_opening_progress")
def joint_opening_progress(cfg: SceneJointConfig, sim: Simulation) -> Reward:
    """Reward a step that moves a joint of the scene towards the joint's upper limit.

        reward = opening_after - opening_before,  opening = (q - low) / (high - low)

    The reward is `[*B]`. The opening is 0 at the lower limit and 1 at the upper limit.
    """
    joint = _checked(cfg, sim)

    def reward(before: TensorDict, after: TensorDict) -> Tensor:
        return opening_of(sim, after["world"], joint) - opening_of(sim, before["world"], joint)

    return reward
