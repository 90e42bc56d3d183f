"""Penalties that depend on what a request has generated, counted along each node's own path.

SGLang accumulates them on the host from a request's output so far. In a tree every node continues
another text, and under overlap the host does not know the last step's tokens yet, so the counts
live on the device: one row a request for what is committed, and the node's ancestors on top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from kdtree_sglang.ops import Tree


def is_penalised(req: Any) -> bool:
    """Whether a request asks for any of the four."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


@dataclass(frozen=True)
class _Rows:
    """A batch's parameters on the device, `[bs, 1, 1]` each, and its stop tokens `[bs, S]`."""

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    first_free_position: torch.Tensor
    stop_tokens: torch.Tensor


class PathPenalties:
    """Counts of generated tokens, and the penalties of a tree's nodes.

    Args:
        rows: of the request pool; a request's counts lie at its `req_pool_idx`.
        vocab_size: V.
        device: of the target.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str):
        self._shape = (rows, vocab_size)
        self._device = torch.device(device)
        self._counts: torch.Tensor | None = None  # i32, made for the first request that needs it

    def resume(self, info: SamplingBatchInfo, reqs: Sequence[Any]) -> SamplingBatchInfo:
        """What a prefill samples by: `info`, with the penalties of the text generated so far.

        SGLang's own start from nothing in every prefill, also in the one that repeats a retracted
        request's text; its first token would then be penalised as the first of all.
        """
        if not any(is_penalised(req) and req.output_ids for req in reqs):
            return info
        rows, counts = self._rows(reqs), self._generated(reqs)
        frequency, presence, repetition = (
            per_request.view(-1, 1)
            for per_request in (rows.frequency, rows.presence, rows.repetition)
        )
        used = counts > 0
        additive = -frequency * counts - presence * used
        positions = torch.tensor([len(r.origin_input_ids) + len(r.output_ids) - 1 for r in reqs])
        too_short = self._to_device(positions).view(-1, 1) < rows.first_free_position.view(-1, 1)
        kept = additive.gather(1, rows.stop_tokens)
        additive.scatter_(1, rows.stop_tokens, kept.masked_fill(too_short, float("-inf")))
        return dataclasses.replace(
            info,
            penalizer_orchestrator=None,
            acc_additive_penalties=additive,
            acc_scaling_penalties=torch.where(used, repetition, 1.0),
        )

    def begin(
        self, reqs: Sequence[Any], pool_indices: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        """Start over after a prefill, which a retracted request repeats with its output so far.

        Args:
            reqs: of the batch.
            pool_indices: `[bs]`, their rows.
            next_tokens: `[bs]`, what the prefill generated.
        """
        if not any(map(is_penalised, reqs)):
            return
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        rows = pool_indices.to(torch.int64)
        self._counts[rows] = self._generated(reqs)
        self._add(rows, next_tokens.view(-1, 1))

    def commit(
        self,
        reqs: Sequence[Any],
        pool_indices: torch.Tensor,
        out_tokens: torch.Tensor,
        commit_lens: torch.Tensor,
    ) -> None:
        """Count what a step committed: the first `commit_lens` `[bs]` of `out_tokens` `[bs, S]`."""
        if self._counts is None or not any(map(is_penalised, reqs)):
            return
        steps = torch.arange(out_tokens.shape[1], device=out_tokens.device)
        self._add(pool_indices.to(torch.int64), out_tokens, steps < commit_lens.unsqueeze(1))

    def apply(
        self, logits: torch.Tensor, reqs: Sequence[Any], pool_indices: torch.Tensor, tree: Tree
    ) -> None:
        """Penalise `logits` `[bs*N, V]` in place, as plain decoding would after each node's text.

        First the additive penalties, then the scaling of repetition_penalty: plain decoding's order
        (seam: srt/sampling/sampling_batch_info.py, _apply_pre_grammar_logits_transforms).
        """
        if self._counts is None or not any(map(is_penalised, reqs)):
            return
        bs, width = tree.tokens.shape
        rows = self._rows(reqs)
        nodes = logits.view(bs, width, -1)
        committed = self._counts[pool_indices.to(torch.int64)].unsqueeze(1)  # [bs, 1, V]

        # How often each node's path beyond the root holds each node's token.
        seen = _descends(tree)
        seen[:, :, 0] = False  # the root is committed
        same = tree.tokens.unsqueeze(2) == tree.tokens.unsqueeze(1)
        on_path = torch.matmul(seen.float(), same.float()).to(torch.int32)  # [bs, N, N]

        # A node differs from the committed text only in the tokens of its path, so these are
        # computed apart and put over the rest; a token that two nodes share gets one value twice.
        columns = tree.tokens.unsqueeze(1).expand(bs, width, width)
        apart = _penalise(
            nodes.gather(2, columns),
            committed.expand(bs, width, -1).gather(2, columns) + on_path,
            rows,
        )
        nodes.copy_(_penalise(nodes, committed, rows))
        nodes.scatter_(2, columns, apart)

        # min_new_tokens forbids the request's stop tokens after nodes that end too short a text.
        too_short = tree.positions.unsqueeze(2) < rows.first_free_position
        stops = rows.stop_tokens.unsqueeze(1).expand(bs, width, -1)
        kept = nodes.gather(2, stops)
        nodes.scatter_(2, stops, kept.masked_fill(too_short, float("-inf")))

    def _generated(self, reqs: Sequence[Any]) -> torch.Tensor:
        """`[bs, V]` i32: how often each token stands in the output so far, on the host's word."""
        counts = torch.zeros((len(reqs), self._shape[1]), dtype=torch.int32, device=self._device)
        pairs = [
            (row, token)
            for row, req in enumerate(reqs)
            if is_penalised(req)
            for token in req.output_ids
        ]
        if pairs:
            row, token = self._to_device(torch.tensor(pairs)).unbind(1)
            counts.index_put_((row, token), torch.ones_like(row, dtype=torch.int32), True)
        return counts

    def _add(
        self, rows: torch.Tensor, tokens: torch.Tensor, counted: torch.Tensor | None = None
    ) -> None:
        ones = torch.ones_like(tokens) if counted is None else counted
        index = (rows.unsqueeze(1).expand_as(tokens), tokens.to(torch.int64))
        self._counts.index_put_(index, ones.to(torch.int32), accumulate=True)

    def _rows(self, reqs: Sequence[Any]) -> _Rows:
        params = [req.sampling_params for req in reqs]
        stops = [_stop_tokens(req) or [0] for req in reqs]
        longest = max(map(len, stops))
        # Padded by repetition: one value is then written twice. Without any stop token there is
        # nothing to forbid, which a position that every node has passed says.
        padded = [[*row, *[row[0]] * (longest - len(row))] for row in stops]
        numbers = torch.tensor(
            [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params]
        )
        # After a node at this position the text has min_new_tokens tokens.
        free = [
            len(req.origin_input_ids) + p.min_new_tokens - 1 if _stop_tokens(req) else 0
            for req, p in zip(reqs, params, strict=True)
        ]
        numbers = self._to_device(numbers).view(len(reqs), 3, 1, 1)
        return _Rows(
            frequency=numbers[:, 0],
            presence=numbers[:, 1],
            repetition=numbers[:, 2],
            first_free_position=self._to_device(torch.tensor(free)).view(-1, 1, 1),
            stop_tokens=self._to_device(torch.tensor(padded)),
        )

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        # A pageable copy would wait for the running verify.
        pinned = host.pin_memory() if self._device.type == "cuda" else host
        return pinned.to(self._device, non_blocking=True)


def _penalise(logits: torch.Tensor, counts: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """`logits` after `counts` occurrences of their tokens; the two broadcast."""
    used = counts > 0
    logits = logits - rows.frequency * counts - rows.presence * used
    scaled = torch.where(logits < 0, logits * rows.repetition, logits / rows.repetition)
    return torch.where(used, scaled, logits)


def _descends(tree: Tree) -> torch.Tensor:
    """`[bs, N, N]` bool: column j is an ancestor of row i, or i itself."""
    node = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    words = tree.ancestors[:, :, node // 64]
    return (words >> (node % 64)) & 1 == 1


def _stop_tokens(req: Any) -> list[int]:
    """What ends a request (seam: srt/sampling/penaltylib/min_new_tokens.py)."""
    tokenizer = req.tokenizer
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    stops |= set(tokenizer.additional_stop_token_ids or ())
    stops.add(tokenizer.eos_token_id)
    return sorted(token for token in stops if token is not None)
