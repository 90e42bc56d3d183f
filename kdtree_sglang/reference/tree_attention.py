"""Reference of tree_attention: softmax over the seen tail rows and the prefix, in float64."""

import numpy as np

LATENT_DIM = 512


def tree_attention(
    q: np.ndarray,
    k_tail: np.ndarray,
    ancestors: np.ndarray,
    prefix_out: np.ndarray,
    prefix_lse: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Returns [bs * N, h, 512] float64, for an op's error to be measured against.

    With s_j = scale * (q . k_j) over the tail rows j that a query sees,

        out = (exp(lse) * prefix_out + sum_j exp(s_j) * v_j) / (exp(lse) + sum_j exp(s_j)),

    where v_j is the latent part of k_j and exp(lse) is the prefix pass's own sum. Numerator and
    denominator are divided by the exponential of the greatest term. An infinite lse means an empty
    prefix: no term of it enters.
    """
    bs, n, _ = ancestors.shape
    heads = q.shape[1]
    out = np.zeros((bs * n, heads, LATENT_DIM))

    for b in range(bs):
        for i in range(n):
            row = b * n + i
            seen = [b * n + j for j in range(n) if int(ancestors[b, i, j // 64]) >> (j % 64) & 1]
            keys = k_tail[seen].astype(np.float64)
            for head in range(heads):
                terms = scale * (keys @ q[row, head].astype(np.float64))
                values = keys[:, :LATENT_DIM]
                lse = float(prefix_lse[b, head, i])
                if not np.isinf(lse):
                    terms = np.append(terms, lse)
                    values = np.vstack([values, prefix_out[row, head].astype(np.float64)])
                if len(terms) == 0:
                    continue
                weights = np.exp(terms - terms.max())
                out[row, head] = weights @ values / weights.sum()
    return out
