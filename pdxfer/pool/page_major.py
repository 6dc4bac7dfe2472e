"""All layers of a page together, in one raw buffer: SGLang 0.5.18's page-major pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.layout import page_major
from pdxfer.pool.kv import KVPool

if TYPE_CHECKING:
    from typing import Unpack

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders.shapes import KVShape


class PageMajorPool(KVPool):
    """Inside a page: `[K_0: page_size rows][V_0: page_size rows][K_1 ...][V_1 ...]...`.

    K of layer l is a strided view `[pages, page_size, head_num, head_dim]` of the buffer, V alike
    with `v_head_dim`. One region; a page of it is one contiguous run. With draft lanes a second
    region has the envelopes of the draft.
    """

    kv_cache_layout = "page_major"

    def _make_layout(self, **shape: Unpack[KVShape]) -> KVLayout:
        return page_major(**shape)
