"""All layers of a page together, in one raw buffer: SGLang 0.5.18's page-major pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdxfer.layout import page_major
from pdxfer.pool.base import KVPool

if TYPE_CHECKING:
    from typing import Unpack

    import torch

    from pdxfer.layout import KVLayout
    from pdxfer.layout.builders import KVShape


class PageMajorPool(KVPool):
    """Inside a page: `[K_0: page_size rows][V_0: page_size rows][K_1 ...][V_1 ...]...`.

    K of layer l is a strided view `[pages, page_size, head_num, head_dim]` of the buffer, V alike
    with `v_head_dim`. One region; a page of it is one contiguous run.
    """

    @staticmethod
    def _make_layout(**shape: Unpack[KVShape]) -> KVLayout:
        return page_major(**shape)

    def _make_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        pages = self._raw.view(self.store_dtype).view(self.pages, -1)
        k_block = self.page_size * self.head_num * self.head_dim
        v_block = self.page_size * self.head_num * self.v_head_dim

        def view(start: int, block: int, dim: int) -> torch.Tensor:
            rows = pages[:, start : start + block]
            return rows.view(self.pages, self.page_size, self.head_num, dim)

        starts = [layer * (k_block + v_block) for layer in range(self.layer_num)]
        return (
            [view(start, k_block, self.head_dim) for start in starts],
            [view(start + k_block, v_block, self.v_head_dim) for start in starts],
        )

    def _index(self, loc: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return loc // self.page_size, loc % self.page_size
