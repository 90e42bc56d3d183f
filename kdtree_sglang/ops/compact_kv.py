"""compact_kv: moves the accepted path's KV rows to the front of the request's slots.

    buffer_ptrs  [n_buf] int64 or uint64, address of row 0 of each buffer (its data_ptr)
    row_bytes    [n_buf] int64, bytes of a row; row r starts at ptr + r * row_bytes
    slots        [bs, N] int64, row of each verified node; N 1..128
    path         [bs, S] int32, accept_tree's; S 1..128
    accept_len   [bs] int32
    -> None      in each buffer, row slots[b, path[b, j]] goes to row slots[b, j], j = 1..accept_len

In place: path[b, j] >= j ascends, as accept_tree gives it. Within one call the rows named by slots
of the requests that move something must be distinct. Rows that no move names stay as they were. The
tensors and the buffers must live on one device; the buffers are not visible to autograd or to
torch.compile, which may drop this op or reorder it against other uses of them.

Malformed input is contained: accept_len is cut to S - 1 and N - 1; a path entry outside [1, N) or a
negative slot moves nothing. Addresses, row_bytes and the upper end of slots cannot be checked.

Errors: RuntimeError naming the argument, for another dtype, shape, device or layout.

One launch for all buffers on the current stream, no allocation, no waiting for the device.
Source: csrc/compact_kv.cu, csrc/cpu/compact_kv.cpp; reference/compact_kv.py.
"""

import torch

from kdtree_sglang.ops import _extension


def compact_kv(
    buffer_ptrs: torch.Tensor,
    row_bytes: torch.Tensor,
    slots: torch.Tensor,
    path: torch.Tensor,
    accept_len: torch.Tensor,
) -> None:
    _extension.namespace().compact_kv(buffer_ptrs, row_bytes, slots, path, accept_len)
