"""The numbers of RoPE: frequencies, YaRN's stretch and DeepSeek's mscales."""

from __future__ import annotations

import math

import numpy as np

from kdtree_sglang.engine.config import Rope, Yarn


def frequencies(rope: Rope) -> np.ndarray:
    """Radians a position of each pair, `[dim / 2]` float32.

    YaRN keeps pairs that turn more than `beta_fast` times within the original context, slows those
    below `beta_slow` turns down by `factor`, and goes from one to the other linearly between.
    """
    pairs = np.arange(rope.dim // 2)
    base = rope.theta ** (-2.0 * pairs / rope.dim)
    if rope.yarn is None:
        return base.astype(np.float32)
    low = max(math.floor(_pair_of_turns(rope, rope.yarn.beta_fast)), 0)
    high = min(math.ceil(_pair_of_turns(rope, rope.yarn.beta_slow)), rope.dim - 1)
    slowed = np.clip((pairs - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (base * (1.0 - slowed) + base / rope.yarn.factor * slowed).astype(np.float32)


def _pair_of_turns(rope: Rope, turns: float) -> float:
    """The pair, fractional, that turns so many times within the original context."""
    context = rope.yarn.original_max_position_embeddings
    return rope.dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def amplitude(rope: Rope) -> float:
    """What cosine and sine are multiplied by."""
    yarn = rope.yarn
    if yarn is None:
        return 1.0
    if yarn.mscale_all_dim == 0:
        return _mscale(yarn, 1.0)
    return _mscale(yarn, yarn.mscale) / _mscale(yarn, yarn.mscale_all_dim)


def softmax_scale(head_dim: int, rope: Rope) -> float:
    """MLA's: head_dim ** -0.5, times the square of the mscale of all dimensions."""
    scale = head_dim**-0.5
    if rope.yarn is not None and rope.yarn.mscale_all_dim != 0:
        scale *= _mscale(rope.yarn, rope.yarn.mscale_all_dim) ** 2
    return scale


def _mscale(yarn: Yarn, mscale: float) -> float:
    return 1.0 if yarn.factor <= 1 else 0.1 * mscale * math.log(yarn.factor) + 1.0
