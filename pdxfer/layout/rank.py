"""Ranks: the place of a worker in its model instance."""

from __future__ import annotations

from dataclasses import dataclass

from pdxfer import limits
from pdxfer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a model instance: attention TP rank, pipeline stage, context parallel part."""

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    cp: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp"):
            value, size = getattr(self, name), getattr(self, f"{name}_size")
            for field, number in ((name, value), (f"{name}_size", size)):
                if isinstance(number, bool) or not isinstance(number, int):
                    raise ConfigError(f"{field} is {number!r}; it must be an int")
            if not 0 <= value < size:
                raise ConfigError(
                    f"{name} is {value}, {name}_size {size}; 0 <= {name} < {name}_size must hold",
                    fields={name: str(value), f"{name}_size": str(size)},
                )
        if self.instance_size > limits.RANKS_PER_INSTANCE_MAX:
            raise ConfigError(
                f"tp_size * pp_size * cp_size is {self.instance_size}; at most "
                f"{limits.RANKS_PER_INSTANCE_MAX} ranks are served"
            )

    @property
    def index(self) -> int:
        """Its place in the instance, which is also its sender and its receiver index."""
        return (self.pp * self.cp_size + self.cp) * self.tp_size + self.tp

    @property
    def instance_size(self) -> int:
        """How many ranks the instance has."""
        return self.tp_size * self.pp_size * self.cp_size
