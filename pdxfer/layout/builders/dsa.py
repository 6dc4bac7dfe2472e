"""Builder of layouts of sparse latent attention (DSA): latent rows, and the keys of an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdxfer.errors import ConfigError
from pdxfer.layout.builders.arguments import layer_ids
from pdxfer.layout.builders.keywords import named
from pdxfer.layout.builders.latent import mla
from pdxfer.layout.builders.parts import join_parts, only_group
from pdxfer.layout.kv_layout import KVLayout
from pdxfer.layout.planes import Plane, RegionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

QUANTISED: Final = 128
"""Elements of an index key, or of a packed latent part, that share one scale of 4 bytes."""
SCALE_BYTES: Final = 4
INDEX: Final = "index_k"
INDEX_SCALE: Final = "index_k_scale"


@named
def dsa(  # noqa: PLR0913 the shape of a pool
    *,
    layers: Iterable[int],
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    pages: int,
    dtype: str,
    index_head_dim: int = QUANTISED,
    index_layers: Iterable[int] | None = None,
    packed: bool = False,
    reserved_pages: int = 1,
    group: str = "full",
    model: str = "",
) -> KVLayout:
    """Sparse latent attention (DSA): rows as `mla`, and quantised keys of an index by page.

    Regions are the rows of every layer, then the index of every layer that has one: of each page
    first the keys of all tokens (8-bit floats), then their scales (one float32 for 128 elements).
    Rows and keys are the same on every rank.

    Args:
        layers: global ids of the layers that are here, such as `range(32)`.
        kv_lora_rank: elements of the latent part of a row.
        qk_rope_head_dim: elements of the rope part of a row.
        page_size: tokens of a page.
        pages: pages of the pool, the reserved ones included.
        dtype: name of an element's type, as for `token_major`.
        index_head_dim: elements of an index key, a multiple of 128; 128 unless given.
        index_layers: global ids of the layers of the model that have an index; those that are not
            among `layers` do not count. None, the default, means all.
        packed: whether the latent part is 8-bit floats with their scales behind them (one float32
            for 128 elements), and the rope part bfloat16; `dtype` is then float8_e4m3fn.
        reserved_pages: page ids below this number never travel; 1 unless given.
        group: name of the group of pages; `full` unless given.
        model: `name@revision`, compared where both sides give it; empty unless given.

    Raises:  ConfigError: a value that no pool has, an unknown or a missing argument.
    """
    ids = layer_ids(layers)
    given = ids if index_layers is None else tuple(index_layers)
    indexed = tuple(layer for layer in layer_ids(given) if layer in ids) if given else ()
    _check_blocks(index_head_dim=index_head_dim)
    widths = (kv_lora_rank, qk_rope_head_dim)
    if packed:
        if dtype != "float8_e4m3fn":
            raise ConfigError(f"dtype is {dtype}: packed rows have float8_e4m3fn elements")
        _check_blocks(kv_lora_rank=kv_lora_rank)
        widths = packed_widths(kv_lora_rank, qk_rope_head_dim)
    rows = mla(
        layers=ids,
        kv_lora_rank=widths[0],
        qk_rope_head_dim=widths[1],
        page_size=page_size,
        pages=pages,
        dtype=dtype,
        reserved_pages=reserved_pages,
        group=group,
        model=model,
    )
    return join_parts(rows, _index(rows, indexed, index_head_dim)) if indexed else rows


def packed_widths(kv_lora_rank: int, qk_rope_head_dim: int) -> tuple[int, int]:
    """Bytes of the latent part of a packed row, its scales included, and of the rope part."""
    return kv_lora_rank + kv_lora_rank // QUANTISED * SCALE_BYTES, 2 * qk_rope_head_dim


def index_bytes(index_head_dim: int) -> int:
    """Bytes of one token in an index: its key and the scales."""
    return index_head_dim + index_head_dim // QUANTISED * SCALE_BYTES


def _index(rows: KVLayout, layers: tuple[int, ...], index_head_dim: int) -> KVLayout:
    """The index alone, of the group of `rows`."""
    group = only_group(rows)
    page = group.page_size * index_bytes(index_head_dim)
    scales = index_head_dim // QUANTISED * SCALE_BYTES
    parts = ((INDEX, 0, index_head_dim, "float8_e4m3fn"),
             (INDEX_SCALE, group.page_size * index_head_dim, scales, "float32"))  # fmt: skip
    planes = tuple(
        Plane(
            group=group.name,
            part=part,
            layer=layer,
            region=region,
            base=base,
            page_stride=page,
            row_stride=cell,
            head_stride=cell,
            head_first=0,
            heads=1,
            heads_total=1,
            cell_bytes=cell,
            rows=group.page_size,
            dtype=dtype,
        )
        for part, base, cell, dtype in parts
        for region, layer in enumerate(layers)
    )
    regions = tuple(RegionSpec(group.pages * page, page) for _ in layers)
    return KVLayout((group,), planes, regions, rows.dtype, rows.model)


def _check_blocks(**width: int) -> None:
    for name, value in width.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % QUANTISED:
            raise ConfigError(
                f"{name} is {value!r}; it must be a multiple of {QUANTISED}",
                fields={name: str(value)},
            )
