"""Layouts of host pools: whatever a device pool holds, in the orders that host caches use.

One function lays out what the device pool has (K and V of one width or two, latent rows, block
scales, keys of an index, lanes of a draft model), so that none of them needs an order of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pdxfer.errors import ConfigError
from pdxfer.layout.builders import table
from pdxfer.layout.builders.arguments import positive
from pdxfer.layout.builders.parts import only_group
from pdxfer.layout.builders.shapes import Part, Shape, Tensor
from pdxfer.layout.groups import TOKEN as TOKEN_GROUP
from pdxfer.layout.planes import Plane

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdxfer.layout.groups import Group
    from pdxfer.layout.kv_layout import KVLayout

_ONE_ROW: Final = (("latent", "rope"),)
"""Parts that share a row."""


def units_of(layout: KVLayout) -> tuple[tuple[str, ...], ...]:
    """The parts of a layout by the tensor that holds them, in the order in which they appear.

    Parts of one tensor share their rows: `latent` and `rope` do, every other part is alone.
    """
    names = list(dict.fromkeys(plane.part for plane in layout.planes))
    units = []
    for name in names:
        unit = next((u for u in _ONE_ROW if name in u and set(u) <= set(names)), (name,))
        if unit not in units:
            units.append(unit)
    return tuple(units)


def host_layout(
    like: KVLayout,
    arrangement: str,
    *,
    pages: int,
    page_size: int | None = None,
    head_groups: int = 1,
    reserved_pages: int = 0,
) -> KVLayout:
    """The parts of a device pool's layout, in the order of a host pool.

    Args:
        like: the layout of the device pool, of one token group; its parts, layers, heads and cells
            are taken, not where they lie.
        arrangement: the order: `layer_first`, `page_first`, `page_first_direct`, `page_head` or
            `page_unified`.
        pages: pages of the host pool.
        page_size: tokens of a page; None, the default: those of `like`.
        head_groups: into how many groups `page_unified` divides the heads; it must divide the
            heads of every part.
        reserved_pages: page ids below this number never travel; host pools have none.

    Raises:  ConfigError: another arrangement, heads that cannot be grouped, tiles of another page
             size, a group of states, several groups.
    """
    known = table.names(table.HOST)
    if arrangement not in known:
        raise ConfigError(
            f"Unsupported layout: {arrangement}; a host pool has one of {', '.join(known)}",
            fields={"layout": arrangement},
        )
    positive(pages=pages, head_groups=head_groups)
    source = only_group(like)
    if source.kind != TOKEN_GROUP:
        raise ConfigError(f"group {source.name} holds states; a host pool holds token pages")
    group = replace(
        source,
        page_size=source.page_size if page_size is None else page_size,
        pages=pages,
        reserved_pages=reserved_pages,
    )
    positive(page_size=group.page_size)
    tensors = tuple(_tensors(like, group, source))
    shape = Shape(like.layers, tensors, group, like.dtype, like.model)
    return table.ROWS[arrangement].layout(shape, head_groups=head_groups)


def _tensors(like: KVLayout, group: Group, source: Group) -> Iterator[Tensor]:
    for number, unit in enumerate(units_of(like)):
        for layer in like.layers:
            keys = [(group.name, part, layer) for part in unit]
            if keys[0] not in like.planes_by_key:
                continue
            parts = tuple(_part(like.planes_by_key[key]) for key in keys)
            if parts[0].tile and group.page_size != source.page_size:
                raise ConfigError(
                    f"page_size={group.page_size}: tiles {parts[0].tile} of part {unit[0]} are of "
                    f"page_size={source.page_size} and move whole; use that"
                )
            if len({part.heads for part in parts}) > 1:
                raise ConfigError(f"parts {unit} of layer {layer} have not the same heads")
            yield Tensor(number, layer, parts)


def _part(planes: tuple[Plane, ...]) -> Part:
    """All heads of a part and layer, whether they lie in one plane or in several."""
    first = planes[0]
    heads = sum(plane.heads for plane in planes)
    if planes[-1].head_end - first.head_first != heads:
        raise ConfigError(
            f"part {first.part} of layer {first.layer} holds heads with a gap between"
        )
    return Part(
        first.part,
        heads,
        first.heads_total,
        first.head_first,
        first.cell_bytes,
        first.dtype,
        first.tile,
    )
