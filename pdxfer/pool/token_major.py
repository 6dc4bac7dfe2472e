"""One K and one V tensor a layer, `[slots, heads, dim]`: SGLang's default, "nhd"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.layout import token_major
from pdxfer.pool.base import KVPool

if TYPE_CHECKING:
    from typing import Unpack

    import torch

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders import KVShape


class TokenMajorPool(KVPool):
    """K of layer l: `[size + page_size, head_num, head_dim]`, contiguous; V alike.

    Regions, in order: K of every layer, then V of every layer, each contiguous.
    """

    @staticmethod
    def _make_layout(**shape: Unpack[KVShape]) -> KVLayout:
        return token_major(**shape)

    def _make_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        def view(region: int, dim: int) -> torch.Tensor:
            return self._region(region).view(self.store_dtype).view(-1, self.head_num, dim)

        layers = range(self.layer_num)
        return (
            [view(layer, self.head_dim) for layer in layers],
            [view(self.layer_num + layer, self.v_head_dim) for layer in layers],
        )

    def _index(self, loc: torch.Tensor) -> torch.Tensor:
        return loc
