"""Greedy decoding in torch: autoregressive, by a chain of drafts, by a tree of drafts.

All three write the target's own text. A step takes every request that has tokens left to write, as
a server's batch does; EOS stops none, so that texts of a given length can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kdtree_sglang import ops
from kdtree_sglang.engine.cache import PageTable
from kdtree_sglang.engine.draft import Draft
from kdtree_sglang.engine.model import Forward, Rows, Target

MODES = ("ar", "chain", "tree")


@dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
        requests: `[b]` i64, numbers of the requests that took it.
        committed: the tokens that each of them wrote, in their order.
        tensors: what it computed, by name, `[b, ...]` each.
    """

    requests: torch.Tensor
    committed: list[list[int]]
    tensors: dict[str, torch.Tensor]


@dataclass
class Generation:
    """A request's text: the prefill gives one token, every step `committed` more.

    The last step's are cut where the text ends.
    """

    tokens: list[int]
    committed: list[int] = field(default_factory=list)


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    mode: str = "ar",
    draft: Draft | None = None,
    budget: int = 16,
    page_size: int = 1,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Generation]:
    """`max_new_tokens` greedy tokens after each prompt, all prompts at once.

    Args:
        mode: "ar", "chain" (the drafter's best token at each depth) or "tree".
        budget: 1..127, nodes of a tree besides its root.
        on_step: called after each step, with tensors that no later step changes.

    Raises:
        ValueError: naming the argument.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode != "ar" and draft is None:
        raise ValueError(f"mode {mode!r} needs a draft")
    if not 1 <= budget <= 127:
        raise ValueError(f"budget must be in 1..127, got {budget}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not prompts or not all(prompts):
        raise ValueError("prompts must be at least one, of at least one token each")
    vocab = target.config.vocab_size
    if not all(0 <= token < vocab for prompt in prompts for token in prompt):
        raise ValueError(f"prompts have a token outside 0..{vocab - 1}, the target's vocabulary")
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > target.config.max_position_embeddings:
        raise ValueError(
            f"the longest prompt and max_new_tokens make {longest} tokens, and the target's "
            f"max_position_embeddings is {target.config.max_position_embeddings}"
        )
    # What a step caches beyond the text before it is dropped.
    window = {"ar": 0, "chain": 0, "tree": budget + 1}[mode]
    if mode != "ar":
        window = max(window, draft.config.block_size)
    with torch.inference_mode():
        table = PageTable(len(prompts), longest + window, page_size, target.device)
        batch = _Batch(target, draft if mode != "ar" else None, table)
        texts = [Generation([token]) for token in batch.prefill(prompts)]
        while unfinished := [r for r, t in enumerate(texts) if len(t.tokens) < max_new_tokens]:
            requests = torch.tensor(unfinished, device=target.device)
            if mode == "ar":
                step = _decode(batch, requests)
            elif mode == "chain":
                step = _chain(batch, requests)
            else:
                step = _tree(batch, requests, budget)
            on_step(step)
            for request, tokens in zip(unfinished, step.committed, strict=True):
                text = texts[request]
                tokens = tokens[: max_new_tokens - len(text.tokens)]
                text.tokens += tokens
                text.committed.append(len(tokens))
    return texts


class _Batch:
    """Where each request stands, and the caches of all.

    Attributes:
        lens: `[r]` i64, tokens in the caches: all that are committed but the last.
        last: `[r]` i64, that token.
    """

    def __init__(self, target: Target, draft: Draft | None, table: PageTable):
        self.target, self.draft, self.table = target, draft, table
        self.latents = target.new_cache(table)
        self.context = draft.new_cache(table) if draft else None
        requests = len(table.pages)
        self.lens = torch.zeros(requests, dtype=torch.int64, device=target.device)
        self.last = torch.zeros(requests, dtype=torch.int64, device=target.device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Caches the prompts and returns the token after each.

        Prompts are padded at their ends. What the pads leave in the caches lies past the prompt,
        where no row looks before a step has written over it.
        """
        lens = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros((len(prompts), int(lens.max())), dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        requests = torch.arange(len(prompts), device=self.target.device)
        rows = self.chain_rows(requests, tokens.to(self.target.device))
        out = self.target.forward(rows, self.latents)
        lens = lens.to(self.target.device)
        first = self.target.logits(out.hidden[requests, lens - 1]).argmax(dim=-1)
        self.commit(rows, requests, self.features(out), first, lens)
        return first.tolist()

    def chain_rows(self, requests: torch.Tensor, tokens: torch.Tensor) -> Rows:
        """tokens `[b, n]` that follow what is cached, one after the other."""
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        positions = self.lens[requests, None] + offsets
        return Rows(tokens, positions, self.lens[requests], self.slots(requests, tokens.shape[1]))

    def slots(self, requests: torch.Tensor, more: int) -> torch.Tensor:
        """`[b, t]` slots of what is cached and of `more` rows."""
        return self.table.first_slots(requests, int(self.lens[requests].max()) + more)

    def features(self, out: Forward) -> torch.Tensor | None:
        return self.draft.features(out.states) if self.draft else None

    def draft_logits(self, requests: torch.Tensor) -> torch.Tensor:
        """`[b, B - 1, V]`"""
        lens = self.lens[requests]
        return self.draft.logits(self.last[requests], lens, self.slots(requests, 0), self.context)

    def commit(
        self,
        rows: Rows,
        requests: torch.Tensor,
        features: torch.Tensor | None,
        last: torch.Tensor,
        lens: torch.Tensor,
    ) -> None:
        """The latent cache already has what is committed; the drafter gets it as features.

        features: `[b, m, A*H]` of the tokens after the prefix. Those past the committed ones are
        cached too, and written over by the next step.
        """
        if self.draft:
            offsets = torch.arange(features.shape[1], device=features.device)
            positions = rows.prefix_lens[:, None] + offsets
            self.draft.append(
                features, positions, self.table.slots(requests, positions), self.context
            )
        self.last[requests], self.lens[requests] = last, lens


def _decode(batch: _Batch, requests: torch.Tensor) -> Step:
    rows = batch.chain_rows(requests, batch.last[requests, None])
    out = batch.target.forward(rows, batch.latents)
    logits = batch.target.logits(out.hidden[:, 0])
    token = logits.argmax(dim=-1)
    batch.commit(rows, requests, batch.features(out), token, rows.prefix_lens + 1)
    tensors = {"prefix_lens": rows.prefix_lens, "root": rows.tokens[:, 0], "logits": logits}
    return Step(requests, token[:, None].tolist(), tensors)


def _chain(batch: _Batch, requests: torch.Tensor) -> Step:
    """What stock DFLASH does: the drafts are kept up to the first that the target would not write.

    No op takes part, so that trees have something to be compared with.
    """
    draft_logits = batch.draft_logits(requests)
    drafts = draft_logits.argmax(dim=-1)
    rows = batch.chain_rows(requests, torch.cat([batch.last[requests, None], drafts], dim=1))
    out = batch.target.forward(rows, batch.latents)
    logits = batch.target.logits(out.hidden)
    predictions = logits.argmax(dim=-1)
    accept_len = (drafts == predictions[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    bonus = predictions.gather(1, accept_len[:, None])[:, 0]
    new_lens = rows.prefix_lens + accept_len + 1
    batch.commit(rows, requests, batch.features(out), bonus, new_lens)
    # An accepted draft is what the target predicted.
    committed = [
        tokens[: count + 1]
        for tokens, count in zip(predictions.tolist(), accept_len.tolist(), strict=True)
    ]
    tensors = {
        "prefix_lens": rows.prefix_lens,
        "root": rows.tokens[:, 0],
        "draft_logits": draft_logits,
        "drafts": drafts,
        "logits": logits,
        "predictions": predictions,
        "accept_len": accept_len,
    }
    return Step(requests, committed, tensors)


def _tree(batch: _Batch, requests: torch.Tensor, budget: int) -> Step:
    """The step of kdtree_sglang.worker, on the same ops."""
    prefix_lens, root = batch.lens[requests], batch.last[requests]
    draft_logits = batch.draft_logits(requests)
    b, depth, vocab = draft_logits.shape
    top = ops.draft_topk(draft_logits.flatten(0, 1), min(budget, vocab))
    draft_ids = top.ids.view(b, depth, -1)
    draft_log_probs = (top.values - top.lse[:, None]).view(b, depth, -1)
    tree = ops.build_tree(draft_ids, draft_log_probs, root, prefix_lens, budget)

    slots = batch.slots(requests, budget + 1)
    rows = Rows(tree.tokens, tree.positions, prefix_lens, slots, tree.ancestors)
    out = batch.target.forward(rows, batch.latents)
    logits = batch.target.logits(out.hidden)
    predictions = logits.argmax(dim=-1)

    accepted = ops.accept_tree(
        tree.tokens,
        tree.next_token,
        tree.next_sibling,
        tree.num_nodes,
        predictions,
        prefix_lens,
        depth,
    )
    ops.compact_kv(
        batch.latents.layer_ptrs,
        batch.latents.row_bytes,
        rows.new_slots,
        accepted.path,
        accepted.accept_len,
    )
    features = batch.features(out)
    path_features = ops.gather_path(features.flatten(0, 1), accepted.path, budget + 1)
    batch.commit(rows, requests, path_features, accepted.bonus, accepted.new_seq_lens)
    committed = [
        tokens[: count + 1]
        for tokens, count in zip(
            accepted.out_tokens.tolist(), accepted.accept_len.tolist(), strict=True
        )
    ]
    tensors = {
        "prefix_lens": prefix_lens,
        "root": root,
        "draft_ids": draft_ids,
        "draft_log_probs": draft_log_probs,
        **tree._asdict(),
        "logits": logits,
        "predictions": predictions,
        **accepted._asdict(),
    }
    return Step(requests, committed, tensors)
