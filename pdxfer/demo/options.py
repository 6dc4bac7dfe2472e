"""What the demo's processes are told, and how a pool is made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import msgspec

from pdxfer import limits
from pdxfer.errors import ConfigError
from pdxfer.layout.builders import table

PAGE_SIZE = 16
KV_HEADS = {"llama": 4, "qwen3": 2, "deepseek-v3": 1, "smollm2": 3}
"""KV heads of each model. The latent rows of `deepseek-v3` are one head, the same on every rank."""
DEVICE_LAYOUTS = ("page-major", "token-major", "unified")
HOST_LAYOUTS = tuple(
    name.replace("_", "-") for name in table.names(table.HOST) if not table.ROWS[name].grouped
)


@dataclass(frozen=True, slots=True)
class Side:
    """How one of the two instances keeps its cache."""

    layout: str = "page-major"
    """One of `DEVICE_LAYOUTS`, or of `HOST_LAYOUTS`: a pool behind a device's."""
    tp: int = 1
    """Ranks that share the KV heads: each has some, or several have the same one."""
    page_size: int = PAGE_SIZE

    def __str__(self) -> str:
        return f"{self.layout} TP {self.tp} page {self.page_size}"

    def check(self, name: str, model: str) -> None:
        """Refuses a TP that the model's KV heads cannot be shared by.

        Raises:  ConfigError: naming the flag, both numbers and the way out.
        """
        heads = KV_HEADS[model]
        if self.tp > limits.RANKS_PER_INSTANCE_MAX:
            raise ConfigError(
                f"--{name}-tp is {self.tp}; at most {limits.RANKS_PER_INSTANCE_MAX} ranks are "
                f"served. Take --{name}-tp {heads}, or 1",
                fields={"tp": str(self.tp)},
            )
        if self.tp < 1 or (heads % self.tp and self.tp % heads):
            raise ConfigError(
                f"--{name}-tp is {self.tp}, and {model} has {heads} KV heads: one has to be a "
                f"multiple of the other. Take --{name}-tp {heads}, or 1",
                fields={"tp": str(self.tp), "kv_heads": str(heads)},
            )
        if self.page_size < 1:
            raise ConfigError(
                f"--page-size gives {name} pages of {self.page_size} tokens. Take 1 or more for "
                f"both sides, as in --page-size {PAGE_SIZE}:64",
                fields={"page_size": str(self.page_size)},
            )


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """One worker process."""

    model: str
    """One of `KV_HEADS`."""
    folder: str
    """Where `smollm2` was saved; empty for the others."""
    seed: int
    dtype: str
    model_name: str
    """Goes into the layout, so that other weights would be refused; empty: not compared."""
    socket_path: str
    """Socket of the daemon beside the worker; empty: the agent is embedded in the worker."""
    lane: str
    tokens_max: int
    """Tokens of the longest prompt; every pool has room for it."""
    side: Side = field(default_factory=Side)
    relayout: bool = False
    """The two sides differ on purpose; else the layout's own answer stands."""

    def to_event(self) -> dict[str, object]:
        """The options as a channel carries them."""
        return asdict(self)

    @classmethod
    def from_event(cls, value: object) -> WorkerOptions:
        """The reverse of `to_event`."""
        return msgspec.convert(value, cls)
