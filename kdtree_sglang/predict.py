"""The target's token after each node of a tree: the best one, or one draw.

Sampling needs nothing of the drafter's distribution: every node draws one token from the target's
own distribution after it, adjusted as plain decoding would adjust it, and the walk follows the
draws (liranringel/ddtree, "sample and walk"). A committed token is thus a draw of the target given
what was committed before it, whatever was drafted.

The draws are SGLang's own sampler's, which takes a node for a request of its own, so temperature,
top-k, top-p, min-p, seeds and backends mean what they mean without speculation (seam:
srt/layers/sampler.py, Sampler.forward).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def adjust_logits(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    width: int,
    grammar_mask: Any | None,
) -> None:
    """Apply, in plain decoding's order, what requests ask of their logits.

    Args:
        logits: `[bs*N, V]` float, changed in place.
        info: of the batch; a request's bias and processors reach all its nodes.
        width: N.
        grammar_mask: of `build_grammar_vocab_mask`, a row a node, or None.
    """
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.view(len(info), width, -1).add_(info.logit_bias.to(logits.dtype).unsqueeze(1))
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, num_tokens_in_batch=width)


def predict(
    sampler: Any,
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
) -> torch.Tensor:
    """`[bs, N]` i64, the target's token after each node.

    Args:
        sampler: SGLang's, of the target's model runner.
        logits: `[bs*N, V]` float, adjusted; a sampling batch destroys them.
        info: of the batch.
        positions: `[bs, N]` i64, of the nodes; a seeded draw depends on its seed and position, so
            it is the one that plain decoding makes there.
    """
    if info.is_all_greedy:
        return torch.argmax(logits, dim=-1).view(positions.shape)
    width = positions.shape[1]
    # A greedy row's own sampling is a draw among equal logits.
    best = torch.argmax(logits, dim=-1) if info.is_any_greedy else None
    nodes = _node_per_row(info, width)
    output = LogitsProcessorOutput(next_token_logits=logits)
    tokens = sampler(output, nodes, False, [], [], positions.reshape(-1)).to(torch.int64)
    if best is not None:
        tokens = torch.where(nodes.top_ks == 1, best, tokens)
    return tokens.view(positions.shape)


def _node_per_row(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """`info` with every request repeated for its nodes, and without what has been applied."""

    def repeat(rows: torch.Tensor | None) -> torch.Tensor | None:
        return None if rows is None else rows.repeat_interleave(width, dim=0)

    return dataclasses.replace(
        info,
        temperatures=repeat(info.temperatures),
        top_ps=repeat(info.top_ps),
        top_ks=repeat(info.top_ks),
        min_ps=repeat(info.min_ps),
        sampling_seed=repeat(info.sampling_seed),
        logit_bias=None,
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        has_custom_logit_processor=False,
        custom_params=None,
        custom_logit_processor=None,
    )
