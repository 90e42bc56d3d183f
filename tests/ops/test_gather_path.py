"""gather_path: against the reference, with NaN in the rows that no path names."""

import numpy as np
import ops_support as support
import pytest
import random_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_sglang import ops, reference


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 16),
    st.integers(1, 64),
    st.integers(1, 16),
    st.one_of(st.integers(1, 70), st.sampled_from([256, 768, 1001])),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_equals_reference(device, seed, bs, n, steps, width, dtype):
    rng = np.random.default_rng(seed)
    path, _ = random_cases.random_path(rng, bs, n, steps)
    rows = torch.from_numpy(rng.standard_normal((bs * n, width))).to(dtype)
    used = {b * n + int(node) for b in range(bs) for node in path[b] if node >= 0}
    unused = torch.ones(bs * n, dtype=torch.bool)
    unused[list(used)] = False
    rows[unused] = float("nan")

    bits = {2: torch.int16, 4: torch.int32}[rows.element_size()]
    expected = reference.gather_path(rows.view(bits).numpy(), path, n)
    out = support.poison(torch.empty((bs, steps, width), dtype=dtype, device=device))
    args = (rows.to(device), *support.put(device, path), n)
    ops.gather_path_out(*args, out)
    assert np.array_equal(out.cpu().view(bits).numpy(), expected)
    assert not out.isnan().any()
    assert torch.equal(out, ops.gather_path(*args))


def test_entries_outside_the_request_give_zeros(device):
    rows = torch.ones(6, 8, device=device)
    path = torch.tensor([[0, 3, -1], [2**31 - 1, -(2**31), 2]], dtype=torch.int32, device=device)
    got = ops.gather_path(rows, path, 3)
    assert got[..., 0].tolist() == [[1, 0, 0], [0, 0, 1]]


def test_misaligned_rows(device):
    flat = torch.arange(1 + 4 * 8, dtype=torch.float32, device=device).bfloat16()
    rows = flat[1:].view(4, 8)
    path = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32, device=device)
    got = ops.gather_path(rows, path, 2)
    assert torch.equal(got[0, 0], rows[0])
    assert torch.equal(got[1, 0], rows[3])


def test_empty(device):
    path = torch.zeros(0, 3, dtype=torch.int32, device=device)
    assert ops.gather_path(torch.zeros(0, 8, device=device), path, 5).shape == (0, 3, 8)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("rows", {"rows": torch.zeros(9, 8)}),
        ("rows", {"rows": torch.zeros(10, 8, dtype=torch.float64)}),
        ("rows", {"rows": torch.zeros(8, 10).t()}),
        ("path", {"path": torch.zeros(2, 4, dtype=torch.int64)}),
        ("num_nodes_per_request", {"num_nodes_per_request": 0}),
        # 4 * 2**62 wraps to 0 rows.
        ("num_nodes_per_request", {"num_nodes_per_request": 2**62}),
    ],
)
def test_errors_name_the_argument(device, named, changes):
    args = {
        "rows": torch.zeros(10, 8),
        "path": torch.zeros(2, 4, dtype=torch.int32),
        "num_nodes_per_request": 5,
    } | changes
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with pytest.raises(RuntimeError, match=f"kdtree: `{named}"):
        ops.gather_path(**args)
