"""A row that shows that a key of the schema has an effect."""

from typing import Any, NamedTuple

from support.key_effects import Changes, See, params
from support.schema_keys import path_of


class Row(NamedTuple):
    """`see(base)` must differ from `see` of the base with the key, at `path`, changed to `value`."""

    key: str
    value: Any
    base: Changes
    see: See = params
    path: str = ""

    @property
    def changed(self) -> Changes:
        """The base with this one key changed."""
        return self.base | {self.path or path_of(self.key): self.value}
