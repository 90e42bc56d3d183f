"""Attention under a boolean mask, and SGLang's flat tree mask; plain torch, no SGLang."""

import torch


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Grouped-query attention under a mask that hides rows completely.

    A hidden row may hold NaN (recycled or poisoned KV): `0 * NaN` is NaN, so weights of zero are
    not enough. Non-finite rows are left out of the product, and a query that does *see* one gets
    NaN, so that the bug behind it stays visible.

    Args:
        query: [batch, n, heads, qk_dim].
        key: [batch, rows, kv_heads, qk_dim].
        value: [batch, rows, kv_heads, v_dim].
        visible: bool [batch, n, rows]; every query sees at least one row.
        scale: factor of the scores.
        logit_cap: soft cap of the scores, 0 for none.

    Returns:
        [batch, n, heads, v_dim] in the query's dtype.
    """
    batch, n, heads, _ = query.shape
    rows, kv_heads, v_dim = value.shape[1:]
    group = heads // kv_heads
    key, value = key.to(query.dtype), value.to(query.dtype)

    # Heads that share a KV head become extra query rows: [batch, kv_heads, group * n, dim].
    grouped = query.view(batch, n, kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * n, -1)
    scores = torch.matmul(grouped, key.permute(0, 2, 3, 1)) * scale
    if logit_cap > 0.0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.view(batch, kv_heads, group, n, rows)
    hidden = ~visible[:, None, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)

    finite = torch.isfinite(value).all(dim=-1, keepdim=True)
    clean = torch.where(finite, value, torch.zeros((), dtype=value.dtype)).transpose(1, 2)
    output = torch.matmul(weights.view(batch, kv_heads, group * n, rows), clean)
    output = output.view(batch, kv_heads, group, n, v_dim)
    broken = ~finite.squeeze(-1).transpose(1, 2)  # [batch, kv_heads, rows]
    sees_broken = (visible[:, None] & broken[:, :, None]).any(dim=-1)  # [batch, kv_heads, n]
    output = output.masked_fill(sees_broken[:, :, None, :, None], float("nan"))
    return output.permute(0, 3, 1, 2, 4).reshape(batch, n, heads, v_dim)


def unpack_custom_mask(
    custom_mask: torch.Tensor, prefix_lens: torch.Tensor, n: int, rows: int
) -> torch.Tensor:
    """SGLang's flat mask (requests concatenated, each [n, prefix + n]) as bool [batch, n, rows].

    Rows past a request's own prefix + n are hidden.
    """
    kv_lens = prefix_lens + n
    expected = int(kv_lens.sum()) * n
    if custom_mask.numel() != expected:
        raise ValueError(f"custom_mask has {custom_mask.numel()} entries, expected {expected}")
    starts = torch.cumsum(kv_lens * n, 0) - kv_lens * n
    column = torch.arange(rows)
    query = torch.arange(n)[None, :, None]
    index = starts[:, None, None] + query * kv_lens[:, None, None] + column
    inside = (column < kv_lens[:, None, None]).expand(-1, n, -1)
    return custom_mask.bool()[index.masked_fill(~inside, 0)] & inside
