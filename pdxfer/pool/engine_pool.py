"""An engine's own pool, seen through a layout: its tensors stay where they are.

What SGLang's pools are is read from their attributes and tensors; nothing of the engine is
imported. Every tensor is held against the layout that its pool seems to have, address by address,
so that a pool of another order is refused and never misread.
"""

from __future__ import annotations

from pdxfer.pool.base import Pool, TokenPool
from pdxfer.pool.engine_tensors import regions_of, seen
from pdxfer.pool.refusals import value_errors


class EnginePool(TokenPool):
    """The keys and values of a pool that an engine made, by slot; also a cache for a client.

    Of SGLang's: `MHATokenToKVPool` (NHD, HND, its page-major one and that in unified memory),
    `MHATokenToKVPoolMXFP8`, `MLATokenToKVPool` (and in unified memory), `DSATokenToKVPool`,
    `MHATokenToKOnlyPool`, `MiniMaxSparseKVPool` whose index has keys alone. A pool of two pools is
    none: give its `full_kv_pool` or `swa_kv_pool`.

    Ownership: the tensors are the engine's; their memory stays while this lives or is attached.
    """

    @value_errors()
    def __init__(
        self,
        pool: object,
        *,
        total_kv_heads: int | None = None,
        head_first: int = 0,
        reserved_pages: int = 1,
        group: str = "full",
        model: str = "",
    ) -> None:
        """Look at the tensors of `pool`. What it does not know itself, the arguments say.

        Args:
            pool: the engine's.
            total_kv_heads: of the whole model; None: those that are here.
            head_first: global number of the first head that is here.
            reserved_pages: page ids below it never travel; the floor, in unified memory.
            group: name of the layout's group.
            model: `name@revision`, compared by both sides where both give it.

        Raises:  ShapeError: a pool whose layout is not known, or with tensors elsewhere.
        """
        heads = {"total_kv_heads": total_kv_heads, "head_first": head_first}
        named = {"reserved_pages": reserved_pages, "group": group, "model": model}
        layout, tensors = seen(pool, heads, named)
        self.pool = pool
        regions = regions_of(layout, tensors)
        super().__init__(layout, device=str(regions[0].device), memory=regions)


def as_pool(pool: object) -> Pool:
    """`pool` itself where it has a layout, else what is known of an engine's pool.

    Raises:  ShapeError: neither.
    """
    return pool if isinstance(pool, Pool) else EnginePool(pool)
