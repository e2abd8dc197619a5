"""A tiny game with the interface of Atari games, so that tests of the preprocessing need neither ale_py nor OpenCV.

A worker process imports this file by name.
"""

import sys
from contextlib import contextmanager
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import gymnasium
import numpy as np
from gymnasium import spaces

SIZE = 84  # equal to the usual size of the images, so that resizing changes nothing
CV2 = """
INTER_AREA = 3

def resize(image, size, interpolation):
    rows, columns = ([i * old // new for i in range(new)] for old, new in zip(image.shape, size[::-1]))
    return image[rows][:, columns].copy()
"""


class Screen:
    """The part of ALE's interface that Gymnasium's AtariPreprocessing reads."""

    def __init__(self, game):
        self._game = game

    def lives(self):
        return self._game.lives

    def getScreenGrayscale(self, image):
        image[:] = self._game.brightness()

    def getScreenRGB(self, image):
        image[:] = np.array([self._game.brightness(), 7, 9], np.uint8)


class FakeAtari(gymnasium.Env):
    """A game of three lives, which starts when FIRE is pressed. The image shows the frame and the last action.

    A life ends after a number of frames in the range `life`, which the seed draws. FIRE earns 5, the last action -3,
    and each fourth frame 2. The extra life at frame 10 must not look like a lost one.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, frameskip=4, obs_type="rgb", max_num_frames_per_episode=0, life=(25, 40), meanings=None, **more):
        self.render_mode = more.pop("render_mode", None)
        assert not more
        self._frameskip, self._limit, self._life = frameskip, max_num_frames_per_episode, life
        self._meanings, self.ale = meanings or ["NOOP", "FIRE", "RIGHT", "LEFT"], Screen(self)
        shape = (SIZE, SIZE) if obs_type == "grayscale" else (SIZE, SIZE, 3)
        self.observation_space, self.action_space = spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(4)

    def get_action_meanings(self):
        return self._meanings

    def brightness(self):
        return np.uint8((4 * self._frame + self._last) % 251)

    def _obs(self):
        obs = np.empty(self.observation_space.shape, np.uint8)
        (self.ale.getScreenGrayscale if obs.ndim == 2 else self.ale.getScreenRGB)(obs)
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._frame, self._last, self.lives, self._left = 0, 0, 3, int(self.np_random.integers(*self._life))
        self._started = False
        return self._obs(), {}

    def step(self, action):
        assert self.lives > 0
        self._frame, self._last = self._frame + 1, int(action)
        self._started |= self._last == 1
        self._left -= self._started
        if self._left == 0:
            self.lives, self._left, self._started = self.lives - 1, int(self.np_random.integers(*self._life)), False
        self.lives += self._frame == 10
        reward = {1: 5.0, 3: -3.0}.get(self._last, 0.0) + 2.0 * (self._frame % 4 == 0)
        return self._obs(), reward, self.lives == 0, self._frame == self._limit, {}

    def render(self):
        return np.full((24, 32, 3), self.brightness(), np.uint8)


gymnasium.register("FakeAtari-v0", FakeAtari)


@contextmanager
def with_cv2():
    """Without OpenCV, this process and its workers import a module `cv2` that can only resize by picking pixels."""
    if find_spec("cv2") is not None:
        yield
        return
    with TemporaryDirectory() as folder:
        (Path(folder) / "cv2.py").write_text(CV2)
        sys.path.insert(0, folder)
        invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            sys.modules.pop("cv2", None)
