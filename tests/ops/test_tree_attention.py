"""tree_attention: against the float64 reference, with NaN in all that no query may read."""

import ml_dtypes
import numpy as np
import ops_support as support
import pytest
import random_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_sglang import ops, reference

SCALE = random_cases.ATTENTION_SCALE
DTYPES = (np.float32, ml_dtypes.bfloat16)


def attend(device: str, *case: np.ndarray, scale: float = SCALE) -> torch.Tensor:
    return ops.tree_attention(*support.put(device, *case), scale)


def check(device, seed, style, bs, n, heads, dtype):
    rng = np.random.default_rng(seed)
    case = random_cases.attention_case(rng, style, bs, n, heads, dtype)
    args = support.put(device, *case)
    out = support.poison(torch.empty_like(args[3]))
    ops.tree_attention_out(*args, SCALE, out)
    support.assert_attention(reference.tree_attention(*case, SCALE), out)
    assert torch.equal(out, ops.tree_attention(*args, SCALE))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(random_cases.ATTENTION_MASKS),
    st.integers(1, 3),
    st.integers(1, 128),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
)
def test_equals_reference(device, seed, style, bs, n, heads, dtype):
    check(device, seed, style, bs, n, heads, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bs", "n", "heads"),
    [(1, 1, 1), (8, 9, 3), (1, 33, 8), (2, 64, 16), (1, 65, 64), (3, 128, 5), (5, 17, 128)],
)
def test_shapes(device, bs, n, heads, dtype):
    check(device, bs, "tree", bs, n, heads, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_conventions_of_an_empty_prefix_are_one(device, dtype):
    rng = np.random.default_rng(0)
    q, k_tail, ancestors, prefix_out, prefix_lse = random_cases.attention_case(
        rng, "tree", 2, 70, 3, dtype
    )
    outs = [
        attend(device, q, k_tail, ancestors, prefix_out, np.full_like(prefix_lse, lse))
        for lse in (np.inf, -np.inf)
    ]
    assert torch.equal(*outs)
    assert not outs[0].isnan().any()


@pytest.mark.parametrize("n", [5, 63, 64, 65, 128])
def test_chain_is_causal_attention(device, n):
    rng = np.random.default_rng(n)
    q = rng.standard_normal((n, 4, 576)).astype(np.float32)
    keys = rng.standard_normal((n, 576)).astype(np.float32)
    ancestors = random_cases.attention_ancestors(rng, "chain", 1, n)
    unread = np.full((n, 4, 512), np.nan, np.float32)
    got = attend(device, q, keys, ancestors, unread, np.full((1, 4, n), np.inf, np.float32))
    whole = torch.from_numpy(keys).double().expand(4, -1, -1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(q).double().transpose(0, 1),
        whole,
        whole[..., :512],
        is_causal=True,
        scale=SCALE,
    )
    support.assert_attention(expected.transpose(0, 1).numpy(), got)


@pytest.mark.parametrize("prefix", [1, 40, 2048])
def test_prefix_and_tail_make_one_attention(device, prefix):
    """Over a prefix result that was rounded to float32, as a prefix pass gives it."""
    rng = np.random.default_rng(prefix)
    n, heads = 33, 8
    q = rng.standard_normal((n, heads, 576)).astype(np.float32)
    keys = rng.standard_normal((prefix + n, 576)).astype(np.float32)
    ancestors = random_cases.attention_ancestors(rng, "tree", 1, n)
    scores = SCALE * np.einsum("nhd,pd->nhp", q.astype(np.float64), keys.astype(np.float64))
    sums = np.exp(scores[..., :prefix])
    prefix_out = sums @ keys[:prefix, :512] / sums.sum(-1, keepdims=True)
    prefix_lse = np.log(sums.sum(-1)).T[None]
    bits = np.unpackbits(ancestors.view(np.uint8), axis=-1, bitorder="little")[0, :, None, :n]
    weights = np.exp(scores)
    weights[..., prefix:] *= bits
    expected = weights @ keys[:, :512] / weights.sum(-1, keepdims=True)
    support.assert_attention(
        expected,
        attend(
            device,
            q,
            keys[prefix:],
            ancestors,
            prefix_out.astype(np.float32),
            prefix_lse.astype(np.float32),
        ),
    )


def test_numbering_of_the_nodes_does_not_matter(device):
    rng = np.random.default_rng(3)
    n, heads = 100, 3
    q, k_tail, ancestors, prefix_out, prefix_lse = random_cases.attention_case(
        rng, "tree", 1, n, heads, np.float32
    )
    bits = np.unpackbits(ancestors.view(np.uint8), axis=-1, bitorder="little")[..., :n]
    order = rng.permutation(n)
    moved = attend(
        device,
        q[order],
        k_tail[order],
        random_cases.pack_ancestors(rng, bits[:, order][:, :, order]),
        prefix_out[order],
        prefix_lse[:, :, order],
    )
    expected = attend(device, q, k_tail, ancestors, prefix_out, prefix_lse)[order]
    support.assert_attention(expected.cpu().double().numpy(), moved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("node", [0, 63, 64, 127])
def test_a_row_reaches_only_those_who_see_it(device, node, dtype):
    rng = np.random.default_rng(node)
    n, heads = 128, 2
    seen = rng.random((1, n, n)) < 0.2
    ancestors = random_cases.pack_ancestors(rng, seen)
    q = rng.standard_normal((n, heads, 576)).astype(dtype)
    k_tail = rng.standard_normal((n, 576)).astype(dtype)
    prefix_out = rng.standard_normal((n, heads, 512)).astype(dtype)
    prefix_lse = rng.standard_normal((1, heads, n)).astype(np.float32)
    before = attend(device, q, k_tail, ancestors, prefix_out, prefix_lse)
    k_tail[node] = np.nan
    after = attend(device, q, k_tail, ancestors, prefix_out, prefix_lse)
    blind = torch.from_numpy(~seen[0, :, node]).to(device)
    assert torch.equal(after[blind], before[blind])
    assert after[~blind].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_weight(device, dtype):
    """The extremes of the prefix's weight, and a NaN that is the caller's own."""
    rng = np.random.default_rng(5)
    n, heads = 6, 5
    q = rng.standard_normal((n, heads, 576)).astype(dtype)
    k_tail = rng.standard_normal((n, 576)).astype(dtype)
    ancestors = random_cases.attention_ancestors(rng, "chain", 1, n)
    prefix_out = rng.standard_normal((n, heads, 512)).astype(dtype)
    prefix_lse = np.zeros((1, heads, n), np.float32)
    prefix_lse[0, :4] = np.array([1e4, -1e4, 3e38, -3e38])[:, None]
    prefix_out[2, 4] = np.nan
    got = attend(device, q, k_tail, ancestors, prefix_out, prefix_lse)
    support.assert_attention(
        reference.tree_attention(q, k_tail, ancestors, prefix_out, prefix_lse, SCALE), got
    )
    (prefix_there,) = support.put(device, prefix_out)
    assert torch.equal(got[:, [0, 2]], prefix_there[:, [0, 2]])
    empty = np.full_like(prefix_lse, np.inf)
    tail_only = attend(device, q, k_tail, ancestors, prefix_out, empty)
    assert torch.equal(got[:, [1, 3]], tail_only[:, [1, 3]])
    assert got[2, 4].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_seen_gives_zeros_and_no_tail_gives_the_prefix(device, dtype):
    rng = np.random.default_rng(6)
    prefix_out = rng.standard_normal((70, 3, 512)).astype(dtype)
    prefix_lse = rng.standard_normal((1, 3, 70)).astype(np.float32)
    prefix_lse[0, 1] = np.inf
    prefix_out[:, 1] = np.nan
    blind = random_cases.pack_ancestors(rng, np.zeros((1, 70, 70), np.bool_))
    got = attend(
        device,
        rng.standard_normal((70, 3, 576)).astype(dtype),
        np.full((70, 576), np.nan).astype(dtype),
        blind,
        prefix_out,
        prefix_lse,
    )
    (prefix_there,) = support.put(device, prefix_out)
    assert torch.equal(got[:, [0, 2]], prefix_there[:, [0, 2]])
    assert not got[:, 1].any()


def test_bfloat16_rounds_to_nearest_even(device):
    """Means of two rows of equal weight: each odd one lies half way between two bfloat16."""
    low = torch.ones(512)
    low[256:] = -1.0
    high = low * (1 + torch.arange(512) % 128 / 128)
    k_tail = torch.zeros(2, 576)
    k_tail[:, :512] = torch.stack([low, high])
    got = ops.tree_attention(
        torch.zeros(2, 1, 576, dtype=torch.bfloat16, device=device),
        k_tail.bfloat16().to(device),
        torch.full((1, 2, 1), 3, device=device),
        torch.full((2, 1, 512), float("nan"), dtype=torch.bfloat16, device=device),
        torch.full((1, 1, 2), float("inf"), device=device),
        1.0,
    )
    expected = ((low + high) / 2).bfloat16()
    assert torch.equal(got.cpu(), expected.expand(2, 1, 512))


def test_rows_inside_a_larger_buffer(device):
    """A slice at the start of a row is aligned."""
    rng = np.random.default_rng(8)
    case = random_cases.attention_case(rng, "tree", 2, 5, 3, ml_dtypes.bfloat16)
    q, k_tail, *rest = support.put(device, *case)
    pool = torch.full((13, 576), float("nan"), dtype=k_tail.dtype, device=device)
    pool[3:] = k_tail
    got = ops.tree_attention(q, pool[3:], *rest, SCALE)
    assert torch.equal(got, ops.tree_attention(q, k_tail, *rest, SCALE))


def test_empty(device):
    rng = np.random.default_rng(9)
    case = random_cases.attention_case(rng, "tree", 0, 5, 3, np.float32)
    assert attend(device, *case).shape == (0, 3, 512)


def arguments(device: str) -> dict:
    return {
        "q": torch.zeros(10, 3, 576, device=device),
        "k_tail": torch.zeros(10, 576, device=device),
        "ancestors": torch.zeros(2, 5, 1, dtype=torch.int64, device=device),
        "prefix_out": torch.zeros(10, 3, 512, device=device),
        "prefix_lse": torch.zeros(2, 3, 5, device=device),
        "scale": 1.0,
        "out": torch.zeros(10, 3, 512, device=device),
    }


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("q", {"q": torch.zeros(10, 3, 576, dtype=torch.float16)}),
        ("q", {"q": torch.zeros(10, 3, 192)}),
        ("q", {"q": torch.zeros(9, 3, 576)}),
        ("q", {"q": torch.zeros(10, 3 * 576)}),
        ("q", {"q": torch.zeros(3, 10, 576).transpose(0, 1)}),
        (r"q.shape\[1\] \(h\)", {"q": torch.zeros(10, 0, 576)}),
        ("k_tail", {"k_tail": torch.zeros(10, 512)}),
        ("k_tail", {"k_tail": torch.zeros(10, 576, dtype=torch.bfloat16)}),
        ("ancestors", {"ancestors": torch.zeros(2, 5, 2, dtype=torch.int64)}),
        ("ancestors", {"ancestors": torch.zeros(2, 5, 1, dtype=torch.int32)}),
        ("ancestors", {"ancestors": torch.zeros(2, 5, dtype=torch.int64)}),
        (r"ancestors.shape\[1\] \(N\)", {"ancestors": torch.zeros(2, 129, 3, dtype=torch.int64)}),
        ("prefix_out", {"prefix_out": torch.zeros(10, 3, 576)}),
        ("prefix_lse", {"prefix_lse": torch.zeros(2, 5, 3)}),
        ("prefix_lse", {"prefix_lse": torch.zeros(2, 3, 5, dtype=torch.float64)}),
        ("scale", {"scale": float("nan")}),
        ("scale", {"scale": float("inf")}),
        ("out", {"out": torch.zeros(10, 3, 576)}),
        ("out", {"out": torch.zeros(10, 3, 512, dtype=torch.bfloat16)}),
    ],
)
def test_errors_name_the_argument(device, named, changes):
    args = arguments(device) | changes
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with pytest.raises(RuntimeError, match=f"kdtree: `{named}`"):
        ops.tree_attention_out(**args)


@pytest.mark.parametrize("named", ["q", "k_tail", "prefix_out", "out"])
def test_misaligned_arguments_are_refused(device, named):
    args = arguments(device)
    aligned = args[named]
    args[named] = torch.zeros(aligned.numel() + 3, device=device)[3:].view(aligned.shape)
    with pytest.raises(RuntimeError, match=f"kdtree: `{named}` must start at .* 12 bytes past"):
        ops.tree_attention_out(**args)
