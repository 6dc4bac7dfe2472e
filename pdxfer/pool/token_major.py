"""One K and one V tensor a layer, `[slots, heads, dim]`: SGLang's default, "nhd"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.layout import token_major
from pdxfer.pool.kv import KVPool

if TYPE_CHECKING:
    from typing import Unpack

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders.shapes import KVShape


class TokenMajorPool(KVPool):
    """K of layer l: `[size + page_size, head_num, head_dim]`, contiguous; V alike.

    Regions, in order: K of every layer, then V of every layer, each contiguous.
    """

    def _make_layout(self, **shape: Unpack[KVShape]) -> KVLayout:
        return token_major(**shape)
