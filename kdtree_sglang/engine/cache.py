"""Paged KV of the torch engine: which slot holds which token, and the rows of every layer."""

from __future__ import annotations

import torch


class PageTable:
    """Slots of each request's positions, for every cache that has one row a token.

    Position p of request r lies in slot `pages[r, p // page_size] * page_size + p % page_size`.
    Requests took their pages in turns, so no request's pages lie together.
    """

    def __init__(self, requests: int, capacity: int, page_size: int, device: torch.device | str):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        per_request = -(-capacity // page_size)
        self.page_size = page_size
        self.num_slots = requests * per_request * page_size
        self.pages = (
            torch.arange(requests * per_request, device=device).view(per_request, requests).T
        )

    def slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[b, n]` i64 slots of positions `[b, n]` of requests `[b]`."""
        page = self.pages[requests[:, None], positions // self.page_size]
        return page * self.page_size + positions % self.page_size

    def first_slots(self, requests: torch.Tensor, length: int) -> torch.Tensor:
        """`[b, length]` i64 slots of each request's first positions."""
        positions = torch.arange(length, device=requests.device)
        return self.slots(requests, positions.expand(len(requests), length))


class RowCache:
    """`[layers, slots, width]` float32 rows, and their addresses as compact_kv takes them."""

    def __init__(self, layers: int, table: PageTable, width: int):
        device = table.pages.device
        self.rows = torch.zeros((layers, table.num_slots, width), device=device)
        self.layer_ptrs = torch.tensor(
            [layer.data_ptr() for layer in self.rows], dtype=torch.int64, device=device
        )
        row_bytes = width * self.rows.element_size()
        self.row_bytes = torch.full((layers,), row_bytes, dtype=torch.int64, device=device)
