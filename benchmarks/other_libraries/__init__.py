"""Other libraries that ecrl is compared with.

A file has the function `make` (speed), `learn` (learning curves) or `solve` (time until the task is solved).

The files `*_ppo.py` train PPO on CartPole-v1 with 128 steps and 4 epochs of 4 minibatches. Actor and critic are
separate 64x64 tanh networks in float32. Adam has learning rate 1e-3. The other numbers are clip 0.2, gamma 0.99, lambda
0.95, gradient norm 0.5, entropy weight 0.01 and value weight 0.5.
"""

from collections.abc import Callable, Iterator
from typing import Any

STEPS = 128
"""Environment steps of a rollout, per environment."""
SOLVED = 475.0
"""Mean return of the last 100 training episodes at which CartPole-v1 counts as solved."""


def iterations_per_call(num_envs: int) -> int:
    """Return the number of iterations of PPO that ecrl and rejax run in one compiled call.

    >>> [iterations_per_call(n) for n in (4, 64, 512)]
    [50, 3, 1]
    """
    return max(1, 200 // num_envs)


def as_work(iterations: Iterator[Any], count: int) -> Callable[[], int]:
    """Run the first iteration, which compiles, and return a function that runs the next one and returns `count`."""
    next(iterations)

    def work() -> int:
        next(iterations)
        return count

    return work
