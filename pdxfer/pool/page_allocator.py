"""Which pages of a host pool are free."""

from __future__ import annotations

import threading
from collections import deque

import torch

from pdxfer.errors import ConfigError
from pdxfer.pool.rows import slots_of


class PageAllocator:
    """Hands out whole pages as token ids, first freed first.

    Threads: any; every call is one step under a lock.
    """

    def __init__(self, pages: int, page_size: int, reserved_pages: int = 0) -> None:
        """All pages from `reserved_pages` on are free."""
        self.pages = pages
        self.page_size = page_size
        self.reserved_pages = reserved_pages
        self._lock = threading.Lock()
        self.clear()

    def available_size(self) -> int:
        """Tokens of the free pages."""
        return len(self._free) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Token ids of `need_size / page_size` pages, int64; None where so many are not free.

        Raises:  ConfigError: no multiple of the page size.
        """
        if need_size < 0 or need_size % self.page_size:
            raise ConfigError(
                "The requested size should be a multiple of the page size.",
                fields={"need_size": str(need_size), "page_size": str(self.page_size)},
            )
        with self._lock:
            count = need_size // self.page_size
            if count > len(self._free):
                return None
            pages = [self._free.popleft() for _ in range(count)]
            for page in pages:
                self._is_free[page] = False
        first = torch.tensor(pages, dtype=torch.int64) * self.page_size
        return (first[:, None] + torch.arange(self.page_size)).reshape(-1)

    def free(self, indices: torch.Tensor) -> int:
        """Give pages back; returns how many tokens.

        Args:    indices: token ids, whole pages in order, as `alloc` gave them.
        Raises:  ConfigError: no whole pages, a page that is free or twice in `indices`, one that is
                 never handed out; nothing was freed.
        """
        loc = slots_of(indices, "indices", self.pages * self.page_size, torch.device("cpu"))
        ids = loc.reshape(-1, self.page_size) if loc.numel() % self.page_size == 0 else None
        if ids is None or not bool((ids == ids[:, :1] + torch.arange(self.page_size)).all()):
            raise ConfigError(f"indices are not whole pages of {self.page_size} tokens")
        if bool((ids[:, 0] % self.page_size).any()):
            raise ConfigError(f"indices do not begin at pages of {self.page_size} tokens")
        pages = (ids[:, 0] // self.page_size).tolist()
        with self._lock:
            for page in pages:
                if page < self.reserved_pages or self._is_free[page]:
                    raise ConfigError(
                        f"page {page} is freed, but it is not allocated (double free)"
                    )
            if len(set(pages)) < len(pages):
                twice = next(page for page in pages if pages.count(page) > 1)
                raise ConfigError(f"page {twice} is freed twice in one call (double free)")
            for page in pages:
                self._is_free[page] = True
            self._free.extend(pages)
        return int(loc.numel())

    def clear(self) -> None:
        """All pages are free again."""
        with self._lock:
            self._free = deque(range(self.reserved_pages, self.pages))
            self._is_free = [True] * self.pages
