"""What the engine tests share: the tiny pair, its prompts, and transformers as the judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from kdtree_sglang.engine import golden
from kdtree_sglang.engine.cache import PageTable, RowCache
from kdtree_sglang.engine.golden import GoldenTarget
from kdtree_sglang.engine.model import Forward, Rows, Target

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"
PAIR = TINY / "mla"
PROMPTS = 50
NEW_TOKENS = 64
BUDGETS = (8, 16, 32, 63)

# Float32 sums in another order: what the engine may differ from transformers by.
LOGIT_TOLERANCE = 1e-4


def read_prompts() -> list[list[int]]:
    """Tokens of the first PROMPTS held-out prompts."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    lines = (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    return [tokenizer.encode(json.loads(line)["text"]) for line in lines]


def padded(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """`[b, longest]` i64, zeros at the ends."""
    tokens = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return tokens


def assert_same_texts(texts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """Token for token; says where each text leaves the expected one."""
    assert len(texts) == len(expected)
    differences = []
    for number, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
        if list(text) != list(wanted):
            pairs = zip(text, wanted, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
            differences.append(f"prompt {number} at {at}: {text} instead of {wanted}")
    assert not differences, f"{len(differences)} of {len(texts)}:\n" + "\n".join(differences)


def prefill(
    target: Target, sequences: Sequence[Sequence[int]], page_size: int, capacity: int = 0
) -> tuple[torch.Tensor, Forward, RowCache, PageTable]:
    """Logits `[b, longest, V]` of a first forward, the rest of it, and the caches it filled."""
    tokens = padded(sequences).to(target.device)
    longest = tokens.shape[1]
    table = PageTable(len(tokens), max(longest, capacity), page_size, target.device)
    cache = target.new_cache(table)
    rows = Rows(
        tokens=tokens,
        positions=torch.arange(longest, device=target.device).expand(tokens.shape),
        prefix_lens=torch.zeros(len(tokens), dtype=torch.int64, device=target.device),
        slots=table.first_slots(torch.arange(len(tokens), device=target.device), longest),
    )
    with torch.inference_mode():
        out = target.forward(rows, cache)
        return target.logits(out.hidden), out, cache, table


def golden_prefill(
    target: GoldenTarget, sequences: Sequence[Sequence[int]], page_size: int
) -> golden.Forward:
    tokens = padded(sequences).numpy()
    b, n = tokens.shape
    causal = np.broadcast_to(np.tril(np.ones((n, n), bool)), (b, n, n))
    positions = np.broadcast_to(np.arange(n), (b, n))
    cache = target.new_cache(b, n, page_size)
    no_prefix = np.zeros(b, np.int64)
    return target.forward(tokens, positions, causal, no_prefix, cache, np.arange(b))
