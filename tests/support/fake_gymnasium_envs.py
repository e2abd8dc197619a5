"""Tiny Gymnasium environments, registered as a user would; a worker imports this file by name."""

import os
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

OBSERVATIONS = {  # kind: space, and what it shows of a bit
    "box": (spaces.Box(-1.0, 1.0, (2, 1), np.float64), lambda b: np.array([[b], [1 - b]], np.float64)),
    "uint8": (spaces.Box(0, 255, (2, 2), np.uint8), lambda b: np.full((2, 2), 3 * b, np.uint8)),
    "discrete": (spaces.Discrete(2, start=3), lambda b: 3 + b),
    "multi_discrete": (spaces.MultiDiscrete([2, 3], start=[1, 0]), lambda b: np.array([1 + b, 2])),
    "multi_binary": (spaces.MultiBinary((1, 2)), lambda b: np.array([[b, 1 - b]], np.int8)),
    "dict": (
        spaces.Dict({"z": spaces.Box(0, 1, (1,)), "in": spaces.Dict({"d": spaces.Discrete(2, start=-1)})}),
        lambda b: {"z": np.array([0.5], np.float32), "in": {"d": b - 1}},
    ),
    "tuple": (
        spaces.Tuple((spaces.Box(0, 1, (1,)), spaces.Discrete(2))),
        lambda b: (np.array([1 - b], np.float32), b),
    ),
}
ACTIONS = {  # kind: space, and which is right for a bit
    "discrete": (spaces.Discrete(2, start=5), lambda b: 5 + b),
    "choice": (spaces.Discrete(4), lambda b: 2 + b),
    "box": (spaces.Box(-2.0, 2.0, (1, 2), np.float64), lambda b: np.array([[b - 0.5, 0.5 - b]])),
    "multi_discrete": (spaces.MultiDiscrete([2, 3], start=[0, 4]), lambda b: np.array([b, 4 + 2 * b])),
    "multi_binary": (spaces.MultiBinary((1, 2)), lambda b: np.array([[b, 1 - b]], np.int8)),
}
MASKS = {  # kind: what is allowed for a bit; always something wrong and what is right
    "choice": lambda b: np.array([b, 1 - b, 1, 1], np.int8),
    "multi_discrete": lambda b: (np.array([1, 1], np.int8), np.array([1 - b, 1, b], np.int8)),
}


SUCCESSES = {"none": None, "text": "yes", "array": np.ones((2, 2)), "object": object, "numpy": np.bool_(True)}


class Bandit(gymnasium.Env):
    """Bandit whose observation shows the right action; one step, with reward 1 minus the distance from it."""

    def __init__(self, sees="box", acts="discrete", masked=False):
        self.observation_space, self._show = OBSERVATIONS[sees]
        self.action_space, self._right = ACTIONS[acts]
        self._mask = MASKS[acts] if masked else None

    def _info(self):
        return {} if self._mask is None else {"action_mask": self._mask(self._bit)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._bit = int(self.np_random.integers(2))
        return self._show(self._bit), self._info()

    def step(self, action):
        assert isinstance(action, type(self.action_space.sample())), type(action)
        assert self.action_space.contains(action), action
        if self._mask is not None:
            mask, start = self._mask(self._bit), np.ravel(self.action_space.start)
            masks = mask if isinstance(mask, tuple) else (mask,)
            assert all(m[a - s] for m, a, s in zip(masks, np.ravel(action), start, strict=True)), "a forbidden action"
        off = np.abs(np.asarray(action) - self._right(self._bit)).mean()
        action = np.zeros_like(action) if isinstance(action, np.generic) else action
        action *= 0  # what an environment does with its action is its own business
        return self._show(self._bit), 1.0 - float(off), True, False, self._info() | {"is_success": off < 0.5}


class Count(gymnasium.Env):
    """Counts its steps from a start that its seed draws; ends at a multiple of 5, is cut at 3 steps.

    `fault` names a fault from the third step or the second reset on, in environments with an odd seed.
    An environment that hangs creates the file `mark` first.
    """

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(2)

    def __init__(self, fault="", info=False, masks=False, shared=True, success=None, mark=None):
        self._mark = mark
        self._success = success  # the key of what an environment of an odd seed reports as its success
        self._fault, self._info, self._masks, self._steps, self._resets = fault, info, masks, 0, 0
        self._buffer, self._shared = np.zeros(2, np.float32), shared  # whether in one memory, every observation
        self.closed = False
        if fault == "make":
            raise RuntimeError("cannot be made")

    def _obs(self):
        self._buffer[:] = self._at, self._since
        return self._buffer if self._shared else self._buffer.copy()

    def _fails(self, fault):
        return self._fault == fault and self._odd

    def _may_fail(self, when):
        if self._fails(f"raise in {when}"):
            raise KeyError(f"{when}\nfailed")
        if self._fails(f"die in {when}"):
            os._exit(3)
        if self._fails(f"hang in {when}"):
            if self._mark is not None:
                Path(self._mark).touch()
            time.sleep(1000)
        if self._fails(f"slow in {when}"):
            time.sleep(0.5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._odd = seed % 2 == 1 if seed is not None else self._odd
        self._resets += 1
        if self._resets > 1:
            self._may_fail("reset")
        self._at, self._since = int(self.np_random.integers(100)), 0
        return self._obs(), {"action_mask": np.array([1, 1], np.int8)} if self._masks else {}

    def step(self, action):
        self._steps += 1
        if self._steps == 3:
            self._may_fail("step")
        self._at, self._since = self._at + 1, self._since + 1
        info = {"success": self._at % 5 == 0} if self._info else {}
        if self._success is not None and self._odd:
            info["success"] = SUCCESSES[self._success]
        if self._masks and not (self._fails("no mask") and self._steps == 3):
            dead = self._fails("dead mask") and self._steps == 3
            info["action_mask"] = np.zeros(2, np.int8) if dead else np.ones(2, np.int8)
        obs = self._obs()
        if self._steps == 3 and self._odd:
            obs = {"nan": obs * np.nan, "shape": obs[:1], "words": ["a", "b"]}.get(self._fault, obs)
        reward, terminated = float(self._at), self._at % 5 == 0
        if self._fault == "arrays":
            reward, terminated = np.array([reward]), np.array([terminated])
        if self._fails("two rewards") and self._steps == 3:
            reward = np.array([1.0, 2.0])
        if self._steps == 3:
            reward = None if self._fails("no reward") else reward
            terminated = None if self._fails("no flag") else terminated
        return obs, reward, terminated, self._since == 3, info

    def close(self):
        self.closed = True


class OneAllowed(gymnasium.Env):
    """Observes its steps, allows only the action of the same number, and truncates at 3.

    With `shared`, the mask is in the same memory at every step.
    """

    observation_space, action_space = spaces.Box(0.0, 3.0, (1,)), spaces.Discrete(4)

    def __init__(self, has_last_mask=True, shared=True):
        self._mask, self._has_last_mask, self._shared = np.zeros(4, np.int8), has_last_mask, shared

    def _result(self, at):
        self._at, self._mask[:] = at, np.arange(4) == at
        mask = self._mask if self._shared else self._mask.copy()
        info = {"action_mask": mask} if self._has_last_mask or at < 3 else {}
        return np.array([at], np.float32), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._result(0)

    def step(self, action):
        obs, info = self._result(self._at + 1)
        return obs, 1.0, False, self._at == 3, info


class Drift(gymnasium.Env):
    """Environment that observes its steps and truncates at 4. Larger actions earn less. Odd seeds fail once at step 3.

    With `strict` it raises if its action is NaN.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, fault="none", strict=False):
        self._fault, self._strict, self._steps = fault, strict, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._odd = seed % 2 == 1 if seed is not None else self._odd
        self._since = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert not self._strict or np.isfinite(action).all(), "it broke"
        self._steps, self._since = self._steps + 1, self._since + 1
        now = self._fault if self._odd and self._steps == 3 else ""
        obs = np.full(1, np.nan if now == "obs" else self._since, np.float32)
        reward = np.inf if now == "reward" else -float(np.nan_to_num(action[0]) ** 2)
        return obs, reward, False, self._since == 4, {}


class Drawn(gymnasium.Env):
    """Environment whose image is as grey as its steps, 40 per step; episodes of odd seeds have 3 steps, others 5.

    `draws` is another result of `render`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012
    observation_space, action_space = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)

    def __init__(self, render_mode=None, draws=None):
        self.render_mode, self._draws, self._length = render_mode, draws, 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._length = self._length if seed is None else 5 - 2 * (seed % 2)
        self._since = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._since += 1
        return np.full(1, self._since, np.float32), 1.0, self._since == self._length, False, {}

    def render(self):
        if self._draws == "error":
            raise RuntimeError("no\nscreen")
        image = np.full((20, 16, 3), 40 * self._since, np.uint8)
        return {"text": "a screen", "float": image / 255.0, "grey": image[..., 0]}.get(self._draws, image)


class Unseen(Drawn):
    """Environment that can only draw text."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012


gymnasium.register("Drawn-v0", Drawn)
gymnasium.register("Unseen-v0", Unseen)
gymnasium.register("Bandit-v0", Bandit)
gymnasium.register("Count-v0", Count)
gymnasium.register("Drift-v0", Drift)
gymnasium.register("OneAllowed-v0", OneAllowed)


class Text(Count):
    """Observes text."""

    observation_space = spaces.Text(3)


class DictAction(Count):
    """Takes two actions at once."""

    action_space = spaces.Dict({"a": spaces.Discrete(2)})


gymnasium.register("Text-v0", Text)
gymnasium.register("DictAction-v0", DictAction)
