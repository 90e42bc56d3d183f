"""compact_kv: against clean copies, for scattered slots, odd row sizes and overlapping moves."""

import numpy as np
import ops_support as support
import pytest
import random_cases
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdtree_sglang import ops, reference

ROW_SIZES = [1, 2, 3, 7, 8, 12, 16, 24, 100, 576, 577, 656, 1024, 1152]


def assert_equals_reference(device, buffers, slots, path, accept_len):
    expected = [buffer.cpu().numpy().copy() for buffer in buffers]
    reference.compact_kv(expected, slots, path, accept_len)
    ops.compact_kv(
        *support.addresses(buffers, device), *support.put(device, slots, path, accept_len)
    )
    for i, (want, buffer) in enumerate(zip(expected, buffers, strict=True)):
        support.assert_same(f"buffer {i}", want, buffer)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 8),
    st.integers(2, 64),
    st.integers(1, 16),
    st.lists(st.one_of(st.sampled_from(ROW_SIZES), st.integers(1, 1152)), min_size=1, max_size=5),
    st.sampled_from([0, 1, 2, 4, 8]),
)
@example(0, 64, 128, 16, [1152, 576], 0)
@example(1, 3, 17, 16, ROW_SIZES, 0)
def test_equals_reference_on_scattered_slots(device, seed, bs, n, steps, row_sizes, offset):
    rng = np.random.default_rng(seed)
    rows = bs * n + 5
    slots = rng.permutation(rows)[: bs * n].reshape(bs, n)
    path, accept_len = random_cases.random_path(rng, bs, n, steps)
    buffers = support.buffers_with_rows(rng, device, rows, row_sizes, offset)
    assert_equals_reference(device, buffers, slots, path, accept_len)


@pytest.mark.parametrize("size", ROW_SIZES)
@pytest.mark.parametrize("shift", [1, 2, 7])
def test_overlapping_chains(device, size, shift):
    """Each target row is the source of a later move, and more rows than one batch of loads."""
    rng = np.random.default_rng(size)
    n, moves = 64, 40
    slots = np.stack([np.arange(n) + 3, np.arange(n)[::-1] + 70])
    path = np.concatenate([[0], np.arange(1, moves + 1) + shift]).astype(np.int32)
    path = np.stack([path, path])
    accept_len = np.full(2, moves, np.int32)
    buffers = support.buffers_with_rows(rng, device, 140, [size], 0)
    assert_equals_reference(device, buffers, slots, path, accept_len)


def test_untouched_rows_stay_poisoned(device):
    """Rows off the path hold NaN; afterwards the front holds the path's rows, unchanged."""
    rng = np.random.default_rng(2)
    n, width = 33, 576
    kv = torch.full((400, width), float("nan"), dtype=torch.bfloat16, device=device)
    slots = rng.permutation(400)[: 2 * n].reshape(2, n)
    path = np.array([[0, 2, 5, 31], [0, 1, 9, -1]], np.int32)
    accept_len = np.array([3, 2], np.int32)
    named = {}
    for b in range(2):
        for j in range(accept_len[b] + 1):
            row = torch.from_numpy(rng.standard_normal(width)).bfloat16()
            kv[slots[b, path[b, j]]] = row.to(device)
            named[int(slots[b, j])] = row
    before = kv.clone()
    pointers = torch.tensor([kv.data_ptr()], dtype=torch.uint64, device=device)
    row_bytes = torch.tensor([width * 2], device=device)
    ops.compact_kv(pointers, row_bytes, *support.put(device, slots, path, accept_len))
    for row, want in named.items():
        assert torch.equal(kv[row].cpu(), want)
    untouched = torch.ones(400, dtype=torch.bool)
    untouched[list(named)] = False
    bits, bits_before = kv.cpu().view(torch.int16), before.cpu().view(torch.int16)
    assert torch.equal(bits[untouched], bits_before[untouched])


def test_malformed_paths_move_nothing(device):
    rng = np.random.default_rng(4)
    slots = rng.permutation(40)[:24].reshape(3, 8)
    slots[2] = -1
    path = np.array([[0, -1, 8, 2**31 - 1], [0, -(2**31), 3, 0], [0, 2, 3, 4]], np.int32)
    accept_len = np.array([2**31 - 1, 3, 3], np.int32)
    buffers = support.buffers_with_rows(rng, device, 40, [48, 7], 0)
    assert_equals_reference(device, buffers, slots, path, accept_len)


def test_negative_length_and_nothing_to_do(device):
    rng = np.random.default_rng(4)
    slots = np.arange(8).reshape(1, 8)
    path = np.array([[0, 3]], np.int32)
    buffers = support.buffers_with_rows(rng, device, 8, [16], 0)
    for length in (-5, 0):
        assert_equals_reference(device, buffers, slots, path, np.array([length], np.int32))
    assert_equals_reference(device, [], slots, path, np.array([1], np.int32))
    assert_equals_reference(device, buffers, slots[:0], path[:0], np.zeros(0, np.int32))


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("buffer_ptrs", {"buffer_ptrs": torch.zeros(2, dtype=torch.int32)}),
        ("row_bytes", {"row_bytes": torch.zeros(3, dtype=torch.int64)}),
        ("slots", {"slots": torch.zeros(2, 5, dtype=torch.int32)}),
        ("slots", {"slots": torch.zeros(2, 129, dtype=torch.int64)}),
        ("path", {"path": torch.zeros(3, 4, dtype=torch.int32)}),
        ("accept_len", {"accept_len": torch.zeros(2, dtype=torch.int64)}),
    ],
)
def test_errors_name_the_argument(device, named, changes):
    args = {
        "buffer_ptrs": torch.zeros(2, dtype=torch.int64),
        "row_bytes": torch.zeros(2, dtype=torch.int64),
        "slots": torch.zeros(2, 5, dtype=torch.int64),
        "path": torch.zeros(2, 4, dtype=torch.int32),
        "accept_len": torch.zeros(2, dtype=torch.int32),
    } | changes
    with pytest.raises(RuntimeError, match=f"kdtree: `{named}"):
        ops.compact_kv(**{k: v.to(device) for k, v in args.items()})
