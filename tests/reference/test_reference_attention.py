"""The tree attention reference against torch's attention in float64 over the whole sequence."""

import numpy as np
import pytest
import random_cases
import torch

from kdtree_sglang import reference


@pytest.mark.parametrize("style", random_cases.ATTENTION_MASKS)
@pytest.mark.parametrize(
    ("n", "heads", "prefix"), [(1, 1, 0), (9, 3, 40), (33, 8, 1), (65, 2, 500), (128, 1, 7)]
)
def test_prefix_and_tail_make_one_attention(style, n, heads, prefix):
    rng = np.random.default_rng(n)
    bs, scale = 2, random_cases.ATTENTION_SCALE
    ancestors = random_cases.attention_ancestors(rng, style, bs, n)
    q = rng.standard_normal((bs, n, heads, 576))
    keys = rng.standard_normal((bs, prefix + n, 576))

    # The prefix pass, as another kernel would give it.
    prefix_out = np.full((bs, n, heads, 512), np.nan)
    prefix_lse = np.full((bs, heads, n), np.inf if n % 2 else -np.inf)
    if prefix > 0:
        scores = torch.from_numpy(scale * np.einsum("bnhd,bpd->bhnp", q, keys[:, :prefix]))
        prefix_lse = scores.logsumexp(-1).numpy()
        weights = scores.softmax(-1).numpy()
        prefix_out = np.einsum("bhnp,bpd->bnhd", weights, keys[:, :prefix, :512])
    got = reference.tree_attention(
        q.reshape(bs * n, heads, 576),
        keys[:, prefix:].reshape(bs * n, 576),
        ancestors,
        prefix_out.reshape(bs * n, heads, 512),
        prefix_lse,
        scale,
    )

    bits = np.unpackbits(ancestors.view(np.uint8), axis=-1, bitorder="little")[:, None, :, :n]
    mask = np.concatenate([np.ones((bs, 1, n, prefix)), bits], axis=-1).astype(np.bool_)
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(q).transpose(1, 2),
        torch.from_numpy(keys)[:, None].expand(-1, heads, -1, -1),
        torch.from_numpy(keys[..., :512])[:, None].expand(-1, heads, -1, -1),
        attn_mask=torch.from_numpy(mask),
        scale=scale,
    )
    # What torch gives a query that sees nothing is its own matter; here it is zeros.
    expected[~torch.from_numpy(mask).any(-1).expand(-1, heads, -1)] = 0.0
    expected = expected.transpose(1, 2).reshape(bs * n, heads, 512).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_nothing_seen_gives_zeros_and_no_tail_gives_the_prefix():
    rng = np.random.default_rng(0)
    prefix_out = rng.standard_normal((2, 1, 512))
    got = reference.tree_attention(
        rng.standard_normal((2, 1, 576)),
        np.full((2, 576), np.nan),
        np.zeros((1, 2, 1), np.int64),
        np.stack([prefix_out[0], np.full((1, 512), np.nan)]),
        np.array([[[3.0, np.inf]]], np.float32),
        1.0,
    )
    assert got[0].tolist() == prefix_out[0].tolist()
    assert not got[1].any()
