"""draft_topk and merge_topk: against the reference, and shards against the whole vocabulary."""

import invariants
import numpy as np
import ops_support as support
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdtree_sglang import ops, reference

STYLES = ("smooth", "ties", "equal", "special", "minus-infinity", "zeros", "sorted")
seeds = st.integers(0, 2**32 - 1)
styles = st.sampled_from(STYLES)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def random_logits(rng, style: str, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    x = rng.standard_normal((rows, vocab)).astype(np.float32) * 4
    if style == "ties":
        x = np.round(x)
    elif style == "equal":
        x[:] = x[:, :1]
    elif style == "special":
        special = rng.choice(np.array([np.nan, -np.inf], np.float32), x.shape)
        x = np.where(rng.random(x.shape) < 0.5, special, x)
        x[0] = np.nan
        x[-1, rng.integers(vocab)] = np.inf
    elif style == "minus-infinity":
        x[:] = -np.inf
        x[0, 0] = np.nan
    elif style == "zeros":
        x = rng.choice(np.array([-0.0, 0.0], np.float32), x.shape)
    elif style == "sorted":
        x = np.sort(x, axis=-1)[:, :: int(rng.choice([-1, 1]))].copy()
    return torch.from_numpy(x).to(dtype)


def run_poisoned(logits: torch.Tensor, k: int, vocab_start: int = 0) -> ops.TopK:
    out = ops.empty_topk(logits.shape[0], k, logits.device)
    for tensor in out:
        support.poison(tensor)
    ops.draft_topk_out(logits, k, out, vocab_start)
    return out


def assert_same_topk(expected, got: ops.TopK) -> None:
    support.assert_same("ids", expected.ids, got.ids)
    support.assert_same("values", expected.values, got.values)
    support.assert_lse(expected.lse, got.lse)


@settings(max_examples=100, deadline=None)
@given(seeds, styles, st.integers(1, 9), st.integers(1, 5000), st.integers(1, 127), dtypes)
@example(0, "smooth", 3, 5000, 127, torch.float32)
@example(1, "equal", 2, 4096, 127, torch.bfloat16)
@example(2, "special", 3, 3001, 127, torch.float16)
@example(3, "minus-infinity", 2, 129, 127, torch.float32)
@example(4, "zeros", 2, 1025, 127, torch.float32)
@example(5, "smooth", 2, 127, 127, torch.bfloat16)
def test_equals_reference(device, seed, style, rows, vocab, k, dtype):
    rng = np.random.default_rng(seed)
    k = min(k, vocab)
    logits = random_logits(rng, style, rows, vocab, dtype)
    start = int(rng.integers(0, 200_000))
    expected = reference.draft_topk(logits.float().numpy(), k, start)
    got = run_poisoned(logits.to(device), k, start)
    assert_same_topk(expected, got)
    got = ops.TopK(*(tensor.cpu().numpy() for tensor in got))
    invariants.check_topk(got, logits.float().numpy(), k, start)


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 700), st.integers(0, 9), st.integers(0, 9), dtypes)
def test_padded_and_misaligned_rows(device, seed, rows, vocab, before, after, dtype):
    """Rows inside a wider tensor, at any address; what is around them is greater."""
    rng = np.random.default_rng(seed)
    k = min(vocab, 40)
    logits = random_logits(rng, "ties", rows, vocab, dtype)
    wide = torch.full((rows, before + vocab + after), 1e4, dtype=dtype)
    wide[:, before : before + vocab] = logits
    inner = wide.to(device)[:, before : before + vocab]
    assert_same_topk(reference.draft_topk(logits.float().numpy(), k), run_poisoned(inner, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", ["smooth", "ties", "equal", "sorted"])
@pytest.mark.parametrize(
    ("rows", "vocab", "k"), [(3, 200_000, 127), (2, 151_936, 32), (7, 163_840, 1)]
)
def test_real_vocabularies(device, dtype, style, rows, vocab, k):
    logits = random_logits(np.random.default_rng(vocab), style, rows, vocab, dtype)
    expected = reference.draft_topk(logits.float().numpy(), k)
    got = run_poisoned(logits.to(device), k)
    assert_same_topk(expected, got)
    again = run_poisoned(logits.to(device), k)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greatest_logits_crowded_in_few_threads(device, dtype):
    """The case that overflows the CUDA version's collection: 120 threads own all great logits."""
    rng = np.random.default_rng(8)
    vocab = 200_000
    per_load = 4 if dtype == torch.float32 else 8
    x = rng.standard_normal((2, vocab)).astype(np.float32)
    crowded = np.arange(vocab) // per_load % 1024 < 120
    x[:, crowded] += 100
    logits = torch.from_numpy(x).to(dtype)
    expected = reference.draft_topk(logits.float().numpy(), 127)
    assert_same_topk(expected, run_poisoned(logits.to(device), 127))


def test_many_rows(device):
    logits = random_logits(np.random.default_rng(3), "ties", 1000, 801, torch.bfloat16)
    expected = reference.draft_topk(logits.float().numpy(), 64)
    assert_same_topk(expected, run_poisoned(logits.to(device), 64))


def test_log_probs_are_safe_for_build_tree(device):
    """A row without one finite logit has NaN log-probs, and no node comes from it."""
    logits = random_logits(np.random.default_rng(3), "smooth", 3, 50, torch.float32)
    logits[1] = float("nan")
    top = ops.draft_topk(logits.to(device), 5)
    log_probs = (top.values - top.lse[:, None]).view(1, 3, 5)
    tree = ops.build_tree(
        top.ids.view(1, 3, 5), log_probs, *support.put(device, np.array([7]), np.array([9])), 20
    )
    assert tree.num_nodes.tolist() == [6]
    assert tree.depths.max() == 1


def test_empty_batch(device):
    assert ops.draft_topk(torch.zeros(0, 9, device=device), 3).ids.shape == (0, 3)


@settings(max_examples=80, deadline=None)
@given(
    seeds, styles, st.integers(1, 8), st.integers(1, 5), st.integers(1, 60), st.integers(1, 127)
)
def test_merge_equals_reference(device, seed, style, shards, rows, k, k_out):
    rng = np.random.default_rng(seed)
    k_out = min(k_out, shards * k)
    values = random_logits(rng, style, shards * rows, k, torch.float32).numpy()
    values = values.reshape(shards, rows, k)
    ids = rng.integers(0, 50, (shards, rows, k))
    lse = random_logits(rng, style, shards, rows, torch.float32).numpy()
    expected = reference.merge_topk(ids, values, lse, k_out)
    out = ops.empty_topk(rows, k_out, device)
    for tensor in out:
        support.poison(tensor)
    ops.merge_topk_out(*support.put(device, ids, values, lse), k_out, out)
    assert_same_topk(expected, out)


@settings(max_examples=50, deadline=None)
@given(seeds, styles, st.integers(1, 6), st.integers(130, 900), st.integers(1, 100), dtypes)
def test_uneven_shards_equal_the_whole(device, seed, style, shards, vocab, k, dtype):
    """Each shard gives min(k, its V) entries, padded as the contract says."""
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, style, 3, vocab, dtype)
    cuts = np.sort(rng.choice(np.arange(1, vocab), shards - 1, replace=False))
    bounds = [0, *cuts.tolist(), vocab]
    parts = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        own = min(k, end - begin)
        part = ops.draft_topk(logits[:, begin:end].to(device), own, begin)
        pad = (0, k - own)
        parts.append(
            ops.TopK(
                torch.nn.functional.pad(part.ids, pad, value=vocab),
                torch.nn.functional.pad(part.values, pad, value=float("-inf")),
                part.lse,
            )
        )
    merged = ops.merge_topk(*(torch.stack(field) for field in zip(*parts, strict=True)), k)
    assert_same_topk(reference.draft_topk(logits.float().numpy(), k), merged)


def test_merge_of_one_shard_is_itself(device):
    logits = random_logits(np.random.default_rng(1), "ties", 4, 300, torch.float32).to(device)
    one = ops.draft_topk(logits, 20)
    merged = ops.merge_topk(*(field[None] for field in one), 20)
    assert all(torch.equal(a, b) for a, b in zip(one, merged, strict=True))


@pytest.mark.parametrize(
    ("named", "logits", "k", "start"),
    [
        ("k", torch.zeros(2, 9), 0, 0),
        ("k", torch.zeros(2, 9), 10, 0),
        ("k", torch.zeros(2, 300), 128, 0),
        ("vocab_start", torch.zeros(2, 9), 3, -1),
        ("logits", torch.zeros(9), 3, 0),
        ("logits", torch.zeros(2, 9, dtype=torch.float64), 3, 0),
        ("logits", torch.zeros(9, 2).t(), 3, 0),
    ],
)
def test_topk_errors_name_the_argument(device, named, logits, k, start):
    out = ops.empty_topk(2, max(k, 0), device)
    with pytest.raises(RuntimeError, match=f"kdtree: `{named}`"):
        ops.draft_topk_out(logits.to(device), k, out, start)


@pytest.mark.parametrize("k_out", [0, 13])
def test_merge_errors_name_the_argument(device, k_out):
    args = support.put(
        device, np.zeros((3, 2, 4), np.int64), np.zeros((3, 2, 4), np.float32),
        np.zeros((3, 2), np.float32),
    )
    with pytest.raises(RuntimeError, match="kdtree: `k_out`"):
        ops.merge_topk(*args, k_out)
    args[2] = args[2].t().contiguous()
    with pytest.raises(RuntimeError, match="kdtree: `lse`"):
        ops.merge_topk(*args, 4)


@pytest.mark.parametrize("k", [0, 10])
def test_references_refuse_a_bad_k(k):
    with pytest.raises(ValueError, match="k must be"):
        reference.draft_topk(np.zeros((2, 9), np.float32), k)
    with pytest.raises(ValueError, match="k_out must be"):
        reference.merge_topk(
            np.zeros((1, 2, 9), int), np.zeros((1, 2, 9)), np.zeros((1, 2)), k
        )
