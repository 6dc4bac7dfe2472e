"""SGLang's pools and ours as sides of a move: a layout, addresses, and rows by slot as bytes.

SGLang's rows are reached through the tensors that its own getters give.
"""

import ctypes

import numpy as np
import torch

from pdxfer.layout import Pages, combine, plan
from pdxfer.pool import EnginePool
from tests.peers.sglang_absent import import_pools

memory_pool = import_pools()
MIB = 1 << 20


class BySlot:
    """`[slots, heads, width]`."""

    def __init__(self, tensor):
        self.tensor = plain(tensor).view(torch.uint8)
        self.heads = tensor.shape[1]

    def get(self, slots):
        return self.tensor[slots]

    def put(self, slots, rows):
        self.tensor[slots] = rows


class ByPage:
    """`[pages, page_size, heads, width]`, any strides."""

    def __init__(self, tensor):
        self.tensor = plain(tensor).view(torch.uint8)
        self.page, self.heads = tensor.shape[1:3]

    def at(self, slots):
        return slots // self.page, slots % self.page

    def get(self, slots):
        return self.tensor[self.at(slots)]

    def put(self, slots, rows):
        self.tensor[self.at(slots)] = rows


class ByTile(ByPage):
    """Scales of MXFP8 as kernels read them, `[pages, heads, 32, page_size / 32, width]`."""

    def __init__(self, tensor):
        self.tensor = tensor.view(torch.uint8)
        self.heads, self.page = tensor.shape[1], 32 * tensor.shape[3]

    def at(self, slots):
        token = slots % self.page
        return slots // self.page, slice(None), token % 32, token // 32


class ByIndexPage(ByPage):
    """Index keys of DSA, `[pages, bytes]`: of a page all keys, then all scales."""

    def __init__(self, tensor, page, first, width):
        self.heads, self.page = 1, page
        self.tensor = tensor[:, first : first + page * width].unflatten(1, (page, 1, width))


class OurRows:
    """Rows of a pool of ours."""

    def __init__(self, rows):
        self.rows, self.heads = rows, rows.heads

    def get(self, slots):
        return self.rows.gather(slots).contiguous().view(torch.uint8)

    def put(self, slots, content):
        self.rows.scatter(slots, content.contiguous().view(self.rows.dtype))


class Side:
    """A pool, or two of them, with the place and the rows of everything in it."""

    def __init__(self, pool, layout, addresses, rows):
        self.pool, self.layout, self.addresses, self.rows = pool, layout, addresses, rows

    def snapshot(self):
        return {key: rows.get(self.slots_of(key[0])).clone() for key, rows in self.rows.items()}

    def slots_of(self, group):
        of = self.layout.group_by_name[group]
        return torch.arange(of.pages * of.page_size)

    def pages_for(self, group, generator, first, end):
        """Shuffled pages of the tokens [first, end), and the slots from `first` to the end of the
        last page."""
        of = self.layout.group_by_name[group]
        start = first // of.page_size * of.page_size
        usable = np.arange(of.reserved_pages, of.pages)
        ids = generator.permutation(usable)[: -(-(end - start) // of.page_size)]
        assert len(ids) * of.page_size >= end - start
        slots = (ids[:, None] * of.page_size + np.arange(of.page_size)).ravel()
        return Pages(ids, start), torch.from_numpy(slots[first - start :])

    def page_size(self, group):
        return self.layout.group_by_name[group].page_size


def plain(tensor):
    return tensor.as_subclass(torch.Tensor)


def theirs(pool, **more):
    """A pool of SGLang's, filled with bytes of all kinds."""
    if hasattr(pool, "swa_kv_pool"):
        halves = [
            their_half(half, layers, group=group)
            for half, layers, group in (
                (pool.full_kv_pool, layers_of(pool, False), "full"),
                (pool.swa_kv_pool, layers_of(pool, True), "swa"),
            )
        ]
        layout = combine(*(half.layout for half in halves))
        addresses = [address for half in halves for address in half.addresses]
        return Side(pool, layout, addresses, halves[0].rows | halves[1].rows)
    return their_half(pool, None, **more)


def layers_of(pool, in_window):
    """Global layers of one half of a pool with a window, in the order of its tensors."""
    found = {at: layer for layer, (at, swa) in pool.layers_mapping.items() if swa is in_window}
    return tuple(found[at] for at in range(len(found)))


def their_half(pool, layers, group="full", **more):
    if layers is not None:
        pool.model_layer_ids = layers
    seen = EnginePool(pool, group=group, **more)
    for part in seen.memory:
        content = np.random.default_rng(part.length_bytes).integers(0, 256, part.length_bytes)
        ctypes.memmove(part.address, content.astype(np.uint8).tobytes(), part.length_bytes)
    addresses = [part.address for part in seen.memory]
    return Side(pool, seen.layout, addresses, their_rows(pool, group))


def their_rows(pool, group):
    """By (group, unit, global layer), through SGLang's getters."""
    if hasattr(pool, "main_pool"):
        rows = their_rows(pool.main_pool, group)
        for layer in pool.index_k_layer_id_mapping:
            rows[group, "index_k", layer] = BySlot(pool.get_index_k_buffer(layer))
        return rows
    first = pool.start_layer
    layers = getattr(pool, "model_layer_ids", range(first, first + pool.layer_num))
    rows = {}
    for at, layer in enumerate(layers):
        key = pool.get_key_buffer(first + at)
        if hasattr(pool, "kv_buffer"):
            rows[group, ("latent", "rope"), layer] = BySlot(key)
        else:
            rows[group, "k", layer] = rows_of(pool, key)
            if hasattr(pool, "v_buffer"):
                rows[group, "v", layer] = rows_of(pool, pool.get_value_buffer(first + at))
        if getattr(pool, "k_scale_buffer", None) is not None:
            for part, tensor in zip("kv", pool.get_kv_scale_buffer(first + at), strict=True):
                tiled = tensor.ndim == 5
                rows[group, f"{part}_scale", layer] = (ByTile if tiled else BySlot)(tensor)
        if hasattr(pool, "index_key_cache") and not pool.skip_topk_layers[at]:
            pages = pool.get_index_k_with_scale_buffer(first + at)
            page = pool.page_size
            rows[group, "index_k", layer] = ByIndexPage(pages, page, 0, 128)
            rows[group, "index_k_scale", layer] = ByIndexPage(pages, page, page * 128, 4)
    return rows


def rows_of(pool, tensor):
    if tensor.ndim == 3:
        return BySlot(tensor)
    return ByPage(tensor.transpose(1, 2) if pool.kv_cache_layout == "hnd" else tensor)


def ours(pool, fill=True):
    """A pool of ours, filled with bytes of all kinds."""
    if fill:
        for part in pool.memory:
            content = np.random.default_rng(part.length_bytes + 1).integers(
                0, 256, part.length_bytes
            )
            ctypes.memmove(part.address, content.astype(np.uint8).tobytes(), part.length_bytes)
    parts = (
        {"full": pool.full_kv_pool, "swa": pool.swa_kv_pool}
        if hasattr(pool, "swa_kv_pool")
        else {pool.layout.groups[0].name: pool}
    )
    rows = {}
    for group, part in parts.items():
        for _, name, layer in part.layout.planes_by_key:
            unit = ("latent", "rope") if name in ("latent", "rope") else name
            rows[group, unit, layer] = OurRows(part.rows(unit, layer))
    return Side(pool, pool.layout, [part.address for part in pool.memory], rows)


def run(runs, source, target):
    for from_region, from_offset, to_region, to_offset, length in runs.tolist():
        ctypes.memmove(
            target.addresses[to_region] + to_offset,
            source.addresses[from_region] + from_offset,
            length,
        )


def move(source, target, generator, tokens, prefix=0, windows=None):
    """Moves the tokens [prefix, tokens) by the plan's runs alone, and compares all of the target.

    Of a group in `windows` the first token is another one.
    """
    given, before = source.snapshot(), target.snapshot()
    spans = {
        group.name: (max(prefix, (windows or {}).get(group.name, 0)), tokens)
        for group in source.layout.groups
    }
    lists = {
        name: (
            source.pages_for(name, generator, (windows or {}).get(name, 0), tokens),
            target.pages_for(name, generator, *span),
        )
        for name, span in spans.items()
    }
    runs = plan(source.layout, target.layout).runs(
        {name: pages for name, ((pages, _), _) in lists.items()},
        {name: pages for name, (_, (pages, _)) in lists.items()},
        spans,
    )
    run(runs, source, target)
    assert source.rows.keys() == target.rows.keys()
    for key, wanted in before.items():
        name = key[0]
        first, end = spans[name]
        size = source.page_size(name)
        if size == target.page_size(name):
            end = -(-end // size) * size  # pages of the same tokens move to their ends
        start = (windows or {}).get(name, 0)
        here = lists[name][0][1][first - start : end - start]
        there = lists[name][1][1][: end - first]
        wanted[there] = given[key][here]
        assert torch.equal(target.rows[key].get(target.slots_of(name)), wanted), key


def both_ways(one, other, generator, tokens, prefix=0, windows=None):
    move(one, other, generator, tokens, prefix, windows)
    move(other, one, generator, tokens, prefix, windows)


def copy(source, target, source_slots, target_slots, **more):
    """The same by each side's host copies; everything else of the target stays."""
    given, before = source.snapshot(), target.snapshot()
    copied = source.pool.get_cpu_copy(source_slots, **{k: v[0] for k, v in more.items()})
    target.pool.load_cpu_copy(copied, target_slots, **{k: v[1] for k, v in more.items()})
    for key, wanted in before.items():
        if key[0] == "full":
            wanted[target_slots] = given[key][source_slots]
            assert torch.equal(target.rows[key].get(target.slots_of("full")), wanted), key
    return copied
