"""Read the meshes of Collada files (.dae), which MuJoCo cannot read, with the package `pycollada`."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ecrl.errors import ConfigError

SUFFIX = ".dae"


def can_read_collada() -> bool:
    """Return True if the package `pycollada` is installed. The extra `robots` of ecrl installs this package."""
    return find_spec("collada") is not None


def collada_mesh(path: Path, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Read all triangles of a Collada file, without colors. Polygons are split into triangles.

    As in ROS, the unit of the file scales the mesh. The `up_axis` of the file is ignored.

    Args:
        path: path of the file.
        key: config key for error messages.

    Returns: `(vertices, faces)`: the vertices in m, float32 `[V, 3]`, and the indices of the three vertices of each
        face, int32 `[F, 3]`.
    Raises: ConfigError if the file cannot be read, has no triangles, or has an invalid unit, vertex or face.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PendingDeprecationWarning)  # pycollada computes with numpy.matrix
            parts, unit = _parts(path)
    except Exception as error:  # pycollada raises errors of many types for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{key}: cannot read the mesh {str(path)!r}: {reason}") from None
    if not parts:
        raise ConfigError(f"{key}: the mesh {str(path)!r} has no triangles; convert it to .stl or .obj")
    if not (unit > 0.0 and np.isfinite(unit)):
        raise ConfigError(
            f"{key}: the mesh {str(path)!r} has the unit {unit} m, expected a positive number; repair the file"
        )
    if any(index.min() < 0 or index.max() >= len(vertices) for vertices, index in parts):
        raise ConfigError(f"{key}: the mesh {str(path)!r} has a face with an unknown vertex; repair the file")
    if not all(np.isfinite(vertices).all() for vertices, _ in parts):
        raise ConfigError(f"{key}: the mesh {str(path)!r} has a vertex that is not finite; repair the file")
    starts = np.cumsum([0, *(len(vertices) for vertices, _ in parts)])
    faces = np.concatenate([index + start for (_, index), start in zip(parts, starts, strict=False)])
    vertices = unit * np.concatenate([vertices for vertices, _ in parts])
    return vertices.astype(np.float32), faces.astype(np.int32)


def _parts(path: Path) -> tuple[list[tuple[np.ndarray, np.ndarray]], float]:
    """Return the vertices and faces of each part of a Collada scene, in the scene's frame, and the file's unit in m."""
    from collada import Collada
    from collada.common import DaeBrokenRefError, DaeUnsupportedError

    document: Any = Collada(str(path), ignore=[DaeUnsupportedError, DaeBrokenRefError])
    geometries = [] if document.scene is None else document.scene.objects("geometry")
    parts = [part for geometry in geometries for part in geometry.primitives()]
    parts = [part.triangleset() if hasattr(part, "triangleset") else part for part in parts]
    triangles = [part for part in parts if np.shape(part.vertex_index)[1:] == (3,) and len(part.vertex_index)]
    unit = document.assetInfo.unitmeter
    return [(part.vertex, part.vertex_index) for part in triangles], 1.0 if unit is None else unit
