"""The five games of MinAtar. Import this package to register the games."""

from ecrl.envs.minatar.asterix import AsterixConfig, minatar_asterix
from ecrl.envs.minatar.breakout import BreakoutConfig, minatar_breakout
from ecrl.envs.minatar.freeway import FreewayConfig, minatar_freeway
from ecrl.envs.minatar.seaquest import SeaquestConfig, minatar_seaquest
from ecrl.envs.minatar.space_invaders import SpaceInvadersConfig, minatar_space_invaders

__all__ = [
    "AsterixConfig",
    "BreakoutConfig",
    "FreewayConfig",
    "SeaquestConfig",
    "SpaceInvadersConfig",
    "minatar_asterix",
    "minatar_breakout",
    "minatar_freeway",
    "minatar_seaquest",
    "minatar_space_invaders",
]
