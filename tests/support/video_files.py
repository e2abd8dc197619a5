"""Reading videos."""

import re
import subprocess

import numpy as np
import pytest

ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="videos need the extra 'video'")


def frames(path):
    """Return the frames of an mp4, uint8 `[T, h, w, 3]`, and the frames per second."""
    command = [ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    read = subprocess.run(command, capture_output=True, check=True)
    width, height, fps = re.search(rb"h264.* (\d+)x(\d+)[ ,].* ([\d.]+) fps", read.stderr).groups()
    return np.frombuffer(read.stdout, np.uint8).reshape(-1, int(height), int(width), 3), float(fps)
