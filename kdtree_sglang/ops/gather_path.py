"""gather_path: picks the accepted path's rows out of the verify forward's rows.

    rows                   [bs * N, C] float32, bfloat16 or float16, node-major within a request
    path                   [bs, S] int32, accept_tree's
    num_nodes_per_request  N
    -> out                 [bs, S, C] of rows' dtype: out[b, j] = rows[b * N + path[b, j]]

An entry outside [0, N), as -1 past the end of a path, gives zeros, whatever rows hold.

Errors: RuntimeError naming the argument, for another dtype, shape, device or layout.

Runs on the current stream, allocates nothing besides the output (the `_out` form nothing), never
waits for the device.
Source: csrc/gather_path.cu, csrc/cpu/gather_path.cpp; reference/gather_path.py."""

import torch

from kdtree_sglang.ops import _extension


def gather_path(
    rows: torch.Tensor, path: torch.Tensor, num_nodes_per_request: int
) -> torch.Tensor:
    out = torch.empty((*path.shape, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    gather_path_out(rows, path, num_nodes_per_request, out)
    return out


def gather_path_out(
    rows: torch.Tensor, path: torch.Tensor, num_nodes_per_request: int, out: torch.Tensor
) -> None:
    _extension.namespace().gather_path_out(rows, path, num_nodes_per_request, out)
