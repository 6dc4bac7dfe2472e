"""Whether the bytes of two sides mean the same, and what to say where they do not.

Compared is what cells mean: model, dtype, parts, layers, heads, head dims, tiles. Where they lie
matters only to a strict pair (`relayout="never"` on either side), whose envelopes move unread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdxfer.errors import ConfigError, LayoutMismatchError
from pdxfer.layout.differences import Difference, differences_of, parts_of, shared_keys
from pdxfer.layout.validation import RELAYOUT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdxfer.layout.kv_layout import KVLayout
    from pdxfer.layout.planes import Plane

_ALIKE: Final = "Whole pages move between two sides that are alike in it."
_IN_THE_TEXT: Final = ("regions", "item_lens", "attention_tp")
"""Fields that a documented text names itself, with both values."""


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared of one side of a pair: its layout, and what it asks for."""

    layout: KVLayout
    attention_tp: int
    relayout: str
    """`allow` or `never`: whether pages may be converted between two layouts."""
    ignore_parts: tuple[str, ...] = ()
    all_layers: bool = True
    """False for a pipeline stage, which may lack layers and parts that other stages have."""


def check_pair(source: Side, destination: Side) -> None:
    """Refuse a pair of workers whose bytes cannot be transferred.

    Args:    source: the prefill side. destination: the decode side.
    Raises:  LayoutMismatchError: the two differ; its `fields` map each differing field to
             `prefill=..., decode=...`, its text names the field, both values and the remedy.
             ConfigError: a `relayout` that is neither `allow` nor `never`.
    Threads: any thread may call it. It is pure: both sides come to the same text.
    """
    for side in (source, destination):
        if side.relayout not in RELAYOUT:
            raise ConfigError(f"relayout is {side.relayout!r}; it must be one of {RELAYOUT}")
    ignored = frozenset(source.ignore_parts) | frozenset(destination.ignore_parts)
    found = differences_of(
        source.layout,
        destination.layout,
        ignored,
        source_all_layers=source.all_layers,
        destination_all_layers=destination.all_layers,
    )
    strict = "never" in (source.relayout, destination.relayout)
    remedy = "" if found else _remedy(source, destination)
    if strict and (source.layout.unified_memory or destination.layout.unified_memory):
        _check_envelopes(source, destination, found, remedy)
    if strict:
        found = found + _strict_differences(source, destination)
    if found:
        raise _refusal(found, *(difference.text for difference in found), remedy)
    if strict:
        _check_same_order(source.layout, destination.layout, ignored, remedy)


def _refusal(found: tuple[Difference, ...], *sentences: str) -> LayoutMismatchError:
    text = " ".join(filter(None, sentences))
    return LayoutMismatchError(text, fields={d.field: d.values for d in found})


def _remedy(source: Side, destination: Side) -> str:
    """What helps a strict pair whose bytes mean the same; empty where neither side says `never`."""
    said = (("prefill", source.relayout), ("decode", destination.relayout))
    sides = [name for name, relayout in said if relayout == "never"]
    if not sides:
        return ""
    return (
        f'{" and ".join(sides)} {"says" if len(sides) == 1 else "say"} relayout="never" (the '
        "default of page-major and unified caches), so nothing is converted. Set "
        'relayout="allow" on both sides, that is on both clients, and the planner converts; or '
        "run the same layout on both."
    )


def _check_envelopes(
    source: Side, destination: Side, found: tuple[Difference, ...], remedy: str
) -> None:
    """Refuse unlike envelopes with the documented text, to the letter, and with what differs."""
    prefill, decode = source.layout, destination.layout
    if source.attention_tp != destination.attention_tp:
        tp = _difference("attention_tp", source.attention_tp, destination.attention_tp)
        raise _refusal(
            (tp, *_page_sizes(prefill, decode), *found),
            "--enable-unified-memory does not support different prefill / decode attention TP "
            f"sizes (prefill={source.attention_tp}, decode={destination.attention_tp}): the "
            "whole-envelope state cannot be TP-resliced.",
            *_named(_page_sizes(prefill, decode)),
            *(difference.text for difference in found),
            remedy,
        )
    if not (source.all_layers and destination.all_layers) and not shared_keys(prefill, decode):
        # Pipeline stages that owe each other nothing: no envelope moves between them.
        return
    if _same_envelopes(prefill, decode):
        return
    theirs = decode.item_lens[0]
    differing = (
        _difference("regions", len(prefill.regions), len(decode.regions)),
        _difference("item_lens", list(prefill.item_lens), list(decode.item_lens)),
        _difference("unified_memory", prefill.unified_memory, decode.unified_memory),
        *_page_sizes(prefill, decode),
        *found,
    )
    differing = tuple(d for d in differing if d.prefill != d.decode)
    text = (
        f"PD KV layout mismatch on the whole-envelope path: prefill has {len(prefill.regions)} KV "
        f"region(s) with item_lens={list(prefill.item_lens)}, decode has {len(decode.regions)} "
        f"with item_len={theirs}. With --enable-unified-memory both sides must enable it and use "
        "the same page size and model spec."
    )
    hidden: tuple[Difference, ...] = ()
    if len(prefill.regions) == len(decode.regions) and prefill.item_lens[0] == theirs:
        # The documented text has one number of decode's, which is no different here.
        hidden = tuple(d for d in differing if d.field == "item_lens")
    raise _refusal(
        differing,
        text,
        *(difference.text for difference in (*hidden, *found)),
        *_named(d for d in differing if d not in found),
        remedy,
    )


def _named(differences: Iterable[Difference]) -> list[str]:
    """Sentences on the fields that a documented text does not name, with both values."""
    return [f"{d.field}: {d.values}." for d in differences if d.field not in _IN_THE_TEXT]


def _same_envelopes(prefill: KVLayout, decode: KVLayout) -> bool:
    """Whether the regions of both hold pages of the same bytes.

    Several groups, or parts that were joined, have an envelope each, in a region of its own. Only
    where both sides are unified does a list of equal lengths stand for the same envelopes.
    """
    one_region = len(prefill.regions) == 1
    both = prefill.unified_memory and decode.unified_memory
    return prefill.item_lens == decode.item_lens and (one_region or both)


def _strict_differences(source: Side, destination: Side) -> tuple[Difference, ...]:
    """Differences in what must be equal where pages move whole, besides what cells mean."""
    prefill, decode = source.layout, destination.layout
    flag = _difference("unified_memory", prefill.unified_memory, decode.unified_memory)
    tp = _difference("attention_tp", source.attention_tp, destination.attention_tp)
    found = (flag, tp, *_page_sizes(prefill, decode))
    return tuple(difference for difference in found if difference.prefill != difference.decode)


def _page_sizes(prefill: KVLayout, decode: KVLayout) -> tuple[Difference, ...]:
    found = []
    for name, group in prefill.group_by_name.items():
        other = decode.group_by_name.get(name)
        if other is not None and other.page_size != group.page_size:
            found.append(
                Difference(
                    field="page_size" if len(prefill.groups) == 1 else f"page_size of {name}",
                    prefill=str(group.page_size),
                    decode=str(other.page_size),
                    documented="Page size mismatch: prefill server has page_size={}, but decode "
                    "server has page_size={}. Both servers must use the same --page-size value.",
                )
            )
    return tuple(found)


def _difference(field: str, prefill: object, decode: object) -> Difference:
    return Difference(field=field, prefill=str(prefill), decode=str(decode), remedy=_ALIKE)


def _check_same_order(
    prefill: KVLayout, decode: KVLayout, ignored: frozenset[str], remedy: str
) -> None:
    """Envelopes of equal size may still hold their cells in another order."""
    if not shared_keys(prefill, decode):
        return
    if prefill.fingerprint_without(ignored) == decode.fingerprint_without(ignored):
        return
    for key, planes in prefill.planes_by_key.items():
        others = decode.planes_by_key.get(key, ())
        if key[1] in ignored or not _share_heads(planes, others):
            continue
        mine = _places(planes, prefill.group_by_name[key[0]].pages)
        theirs = _places(others, decode.group_by_name[key[0]].pages)
        if mine != theirs:
            group, part, layer = key
            field = f"inner order at group {group}, part {part}, layer {layer}"
            raise _refusal(
                (_difference(field, mine, theirs),),
                f"KV layout mismatch: {field}: prefill has {mine}, decode has {theirs}.",
                remedy,
            )
    if any(
        _share_heads(p, decode.planes_by_key.get(k, ())) for k, p in prefill.planes_by_key.items()
    ):
        names = (prefill.fingerprint.hex()[:16], decode.fingerprint.hex()[:16])
        raise _refusal(
            (_difference("fingerprint", *names),),
            f"KV layout mismatch: fingerprint: prefill has {names[0]} with parts "
            f"{parts_of(prefill)}, decode has {names[1]} with parts {parts_of(decode)}.",
            remedy,
        )


def _share_heads(planes: tuple[Plane, ...], others: tuple[Plane, ...]) -> bool:
    return any(
        max(a.head_first, b.head_first) < min(a.head_end, b.head_end)
        for a in planes
        for b in others
    )


def _places(planes: tuple[Plane, ...], pages: int) -> str:
    """Where the cells of a page are, in words; a base behind other tensors is left out."""
    words = []
    for plane in planes:
        at = plane.places(pages)
        words.append(
            f"heads {plane.head_first}-{plane.head_end - 1}"
            + (f" from byte {at['base']}" if at["base"] != -1 else "")
            + f", strides page {at['page_stride']} row {_stride(at['row_stride'])} "
            f"head {_stride(at['head_stride'])}"
        )
    return "; ".join(words)


def _stride(stride: object) -> str:
    return "over all pages" if isinstance(stride, dict) else str(stride)
