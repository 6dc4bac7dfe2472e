"""What two layouts mean differently, field by field."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from pdxfer.layout.dtypes import item_bytes
from pdxfer.layout.planes import TILE, WHOLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pdxfer.layout.kv_layout import KVLayout
    from pdxfer.layout.planes import Plane

_SAME_MODEL: Final = "Both sides must serve the same model with the same cache settings."
_DIM_NAMES: Final = {
    "k": "head_dim",
    "v": "v_head_dim",
    "latent": "kv_lora_rank",
    "rope": "qk_rope_head_dim",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs, both values, and what to do."""

    field: str
    prefill: str
    decode: str
    remedy: str = _SAME_MODEL
    documented: str = ""
    """The documented text with a place for each value; empty where the plain text is used."""

    @property
    def values(self) -> str:
        """Both values, as an error's field shows them."""
        return f"prefill={self.prefill}, decode={self.decode}"

    @property
    def text(self) -> str:
        """The sentence that names field, both values and remedy."""
        if self.documented:
            return self.documented.format(self.prefill, self.decode)
        return (
            f"KV layout mismatch: {self.field}: prefill has {self.prefill}, decode has "
            f"{self.decode}. {self.remedy}"
        )


def differences_of(
    prefill: KVLayout,
    decode: KVLayout,
    ignored: Collection[str],
    *,
    source_all_layers: bool,
    destination_all_layers: bool,
) -> tuple[Difference, ...]:
    """Every difference in what the cells of two layouts mean; empty where there is none.

    Two layouts without a difference can be converted into each other, wherever their cells lie.

    Args:    prefill, decode: the layouts of the two sides. ignored: names of parts that are not
             compared. source_all_layers, destination_all_layers: False for a pipeline stage, which
             may lack what other stages of its instance have.
    """
    found: list[Difference] = []
    if prefill.model and decode.model and prefill.model != decode.model:
        found.append(
            Difference(
                "model",
                prefill.model,
                decode.model,
                remedy="Both sides must serve the same model and revision.",
            )
        )
    found += _dtype_differences(prefill, decode, ignored)
    mine, theirs = _layers_by_part(prefill, ignored), _layers_by_part(decode, ignored)
    lacks = _Lacks(source_all_layers, destination_all_layers)
    named_in_vain = set(ignored) - {
        key[1] for side in (prefill, decode) for key in side.planes_by_key
    }
    found += _part_differences(mine, theirs, lacks, named_in_vain)
    found += _layer_differences(mine, theirs, lacks)
    found += _cell_differences(prefill, decode, ignored)
    return tuple(found)


def shared_keys(prefill: KVLayout, decode: KVLayout) -> set[tuple[str, str, int]]:
    """Each (group, part, layer) that both layouts hold."""
    return prefill.planes_by_key.keys() & decode.planes_by_key.keys()


def parts_of(layout: KVLayout) -> str:
    """The groups and parts of a layout, for a text."""
    return _joined({f"{group}/{part}" for group, part, _ in layout.planes_by_key})


@dataclass(frozen=True, slots=True)
class _Lacks:
    """Which side must have all that the other has."""

    prefill_whole: bool
    decode_whole: bool

    def differ(self, prefill: Collection[object], decode: Collection[object]) -> bool:
        more, less = set(prefill), set(decode)
        return bool((self.decode_whole and more - less) or (self.prefill_whole and less - more))


def _dtype_differences(
    prefill: KVLayout, decode: KVLayout, ignored: Collection[str]
) -> list[Difference]:
    """One difference where the dtypes of all shared planes differ alike, else one for each part."""
    pairs: dict[str, tuple[str, str]] = {}
    for key in sorted(shared_keys(prefill, decode)):
        if key[1] not in ignored:
            planes = (prefill.planes_by_key[key][0], decode.planes_by_key[key][0])
            pairs.setdefault(f"{key[0]}/{key[1]}", (planes[0].dtype, planes[1].dtype))
    differing = {part: pair for part, pair in pairs.items() if pair[0] != pair[1]}
    if not differing:
        return []
    if len(set(pairs.values())) > 1:
        return [Difference(f"dtype of {part}", *pair) for part, pair in differing.items()]
    return [
        Difference(
            "dtype",
            *next(iter(differing.values())),
            documented="KV cache dtype mismatch: prefill server has kv_cache_dtype={}, but decode "
            "server has kv_cache_dtype={}. Both servers must use the same --kv-cache-dtype value.",
        )
    ]


def _layers_by_part(layout: KVLayout, ignored: Collection[str]) -> dict[tuple[str, str], list[int]]:
    layers: dict[tuple[str, str], list[int]] = {}
    for group, part, layer in sorted(layout.planes_by_key):
        if part not in ignored:
            layers.setdefault((group, part), []).append(layer)
    return layers


def _part_differences(
    mine: dict[tuple[str, str], list[int]],
    theirs: dict[tuple[str, str], list[int]],
    lacks: _Lacks,
    named_in_vain: Collection[str],
) -> list[Difference]:
    """The difference between the parts of two sides.

    Args:    named_in_vain: ignored parts that neither side has.
    """
    if not lacks.differ(mine.keys(), theirs.keys()):
        return []
    remedy = f"{_SAME_MODEL} A part that only one side has must be named in ignore_parts"
    if named_in_vain:
        remedy += f"; {_joined(named_in_vain)}, named there, is on neither side"
    return [
        Difference(
            "parts",
            _joined(f"{group}/{part}" for group, part in mine),
            _joined(f"{group}/{part}" for group, part in theirs),
            remedy=f"{remedy}.",
        )
    ]


def _layer_differences(
    mine: dict[tuple[str, str], list[int]], theirs: dict[tuple[str, str], list[int]], lacks: _Lacks
) -> list[Difference]:
    differing = [key for key in mine if key in theirs and lacks.differ(mine[key], theirs[key])]
    if not differing:
        return []
    pairs = {(layer_words(mine[key]), layer_words(theirs[key])) for key in differing}
    if len(pairs) == 1:
        prefill, decode = pairs.pop()
        return [Difference("layers", prefill, decode)]
    return [
        Difference(
            f"layers of {group}/{part}",
            layer_words(mine[group, part]),
            layer_words(theirs[group, part]),
        )
        for group, part in differing
    ]


def layer_words(layers: Iterable[int]) -> str:
    """Layers in words, as ranges and their number: `0-15, 20 (17 layers)`."""
    ordered = sorted(layers)
    words: list[str] = []
    first = last = ordered[0]
    for layer in [*ordered[1:], -1]:
        if layer == last + 1:
            last = layer
            continue
        words.append(str(first) if first == last else f"{first}-{last}")
        first = last = layer
    shown = ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")
    return f"{shown} ({len(ordered)} layers)"


def _cell_differences(
    prefill: KVLayout, decode: KVLayout, ignored: Collection[str]
) -> list[Difference]:
    """Differences between cells of the same part and layer, each field once, at its first layer."""
    found: dict[str, Difference] = {}
    for name in prefill.group_by_name.keys() & decode.group_by_name.keys():
        one, other = prefill.group_by_name[name].kind, decode.group_by_name[name].kind
        if one != other:
            found[name] = Difference(f"kind of group {name}", one, other)
    for key in sorted(shared_keys(prefill, decode)):
        if key[1] in ignored:
            continue
        pair = (prefill.planes_by_key[key][0], decode.planes_by_key[key][0])
        for difference in _plane_differences(*pair, prefill, decode):
            found.setdefault(difference.field, difference)
    return list(found.values())


def _plane_differences(
    mine: Plane, theirs: Plane, prefill: KVLayout, decode: KVLayout
) -> list[Difference]:
    found = []
    part = f"{mine.group}/{mine.part}"
    if mine.heads_total != theirs.heads_total:
        found.append(
            Difference(f"total_kv_heads of {part}", str(mine.heads_total), str(theirs.heads_total))
        )
    sizes = [x.group_by_name[mine.group].page_size for x in (prefill, decode)]
    widths = [_width_bytes(*pair) for pair in zip((mine, theirs), sizes, strict=True)]
    if widths[0] != widths[1]:
        found.append(_width_difference(mine, theirs, part, widths))
    if (mine.row_kind, mine.tile) != (theirs.row_kind, theirs.tile):
        found.append(
            Difference(
                f"tile of {part}",
                _row_words(mine),
                _row_words(theirs),
                remedy="Tiles move whole: both sides must use the same one.",
            )
        )
    elif mine.row_kind == WHOLE and mine.rows != theirs.rows:
        found.append(Difference(f"rows of {part}", str(mine.rows), str(theirs.rows)))
    if TILE in (mine.row_kind, theirs.row_kind) and sizes[0] != sizes[1]:
        found.append(
            Difference(
                f"page_size of {part}",
                str(sizes[0]),
                str(sizes[1]),
                remedy="Tiles move whole: both sides must use the same page size (block size).",
            )
        )
    return found


def _width_bytes(plane: Plane, page_size: int) -> Fraction:
    """Bytes of one token of a head, exactly; a tile has a whole page of tokens."""
    return Fraction(plane.cell_bytes, page_size if plane.row_kind == TILE else 1)


def _width_difference(mine: Plane, theirs: Plane, part: str, widths: list[Fraction]) -> Difference:
    name = _DIM_NAMES.get(mine.part)
    elements = [width / item_bytes(mine.dtype) for width in widths]
    whole = all(count.denominator == 1 for count in elements)
    if name is None or mine.dtype != theirs.dtype or not whole:
        return Difference(f"cell_bytes of {part}", str(mine.cell_bytes), str(theirs.cell_bytes))
    return Difference(f"{name} of {part}", *map(str, elements))


def _row_words(plane: Plane) -> str:
    return plane.tile if plane.row_kind == TILE else f"{plane.row_kind} rows"


def _joined(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:16]) + (", ..." if len(ordered) > 16 else "")
