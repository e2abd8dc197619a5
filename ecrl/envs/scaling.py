"""Scale the lengths in the settings of tasks, terms and events.

In a Config model, the type of each field that scales with the lengths contains a marker, such as `LENGTH` in
`Annotated[Triple, LENGTH]`.
"""

from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel


class ScalesWith(NamedTuple):
    """Marker of a field that `scale_lengths` multiplies by `factor ** power`."""

    power: int


LENGTH, PER_LENGTH, MASS, FORCE = ScalesWith(1), ScalesWith(-1), ScalesWith(3), ScalesWith(4)
"""Markers of lengths and velocities (m, m/s), inverse lengths (1/m), masses (kg) and forces (N)."""

Settings = TypeVar("Settings")


def _times(value: Any, factor: float) -> Any:
    """Multiply a number, or all numbers of nested tuples, by `factor`. None stays None."""
    if isinstance(value, tuple):
        return tuple(_times(x, factor) for x in value)
    return value if value is None else value * factor


def scale_lengths(settings: Settings, factor: float) -> Settings:
    """Return a Config model with scaled lengths, masses and forces. The models inside this model are scaled, too.

        length' = factor length,    mass' = factor^3 mass,    force' = factor^4 force
        1 / length' = 1 / (factor length)

    Times and densities do not change, so velocities and accelerations have the same factor as lengths. `settings` may
    also be a tuple or a dictionary of models. Values without a marker do not change.
    """
    return settings if factor == 1.0 else _scaled(settings, factor)


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_scaled(x, factor) for x in value)
    if isinstance(value, dict):
        return {name: _scaled(x, factor) for name, x in value.items()}
    if not isinstance(value, BaseModel):
        return value
    changes: dict[str, Any] = {}
    for name, info in type(value).model_fields.items():
        marker = next((x for x in info.metadata if isinstance(x, ScalesWith)), None)
        old = getattr(value, name)
        changes[name] = _scaled(old, factor) if marker is None else _times(old, factor**marker.power)
    return value.model_copy(update=changes)
