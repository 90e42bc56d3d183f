"""Greedy decoding of the golden model: autoregressive, and by trees through the numpy references.

With the golden model this is a second implementation of the whole tree step, which shares only the
reading of checkpoints and the numbers of RoPE with the torch engine. EOS stops neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kdtree_sglang import reference
from kdtree_sglang.engine.golden import Cache, Forward, GoldenDraft, GoldenTarget
from kdtree_sglang.reference.accept_tree import Acceptance
from kdtree_sglang.reference.build_tree import Tree


@dataclass(frozen=True)
class GoldenStep:
    """What one tree step computed for `requests` `[b]`, those that had tokens left to write."""

    requests: np.ndarray
    tree: Tree
    predictions: np.ndarray
    accepted: Acceptance


def autoregressive(
    target: GoldenTarget,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    page_size: int = 1,
) -> list[list[int]]:
    """The greedy continuation of each prompt, `max_new_tokens` long, one token a forward."""
    lens = np.array([len(prompt) for prompt in prompts])
    cache = target.new_cache(len(prompts), lens.max() + max_new_tokens, page_size)
    requests = np.arange(len(prompts))
    itself = np.ones((len(prompts), 1, 1), bool)
    token = _prefill(target, prompts, cache)[0]
    written = [token]
    while len(written) < max_new_tokens:
        out = target.forward(token[:, None], lens[:, None], itself, lens, cache, requests)
        token, lens = out.logits[:, 0].argmax(axis=-1), lens + 1
        written.append(token)
    return np.stack(written, axis=1).tolist()


def tree(
    target: GoldenTarget,
    draft: GoldenDraft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    budget: int,
    page_size: int = 1,
    on_step: Callable[[GoldenStep], None] = lambda step: None,
) -> list[list[int]]:
    """The same continuation, each step by a tree of `budget` drafts besides the root."""
    lens = np.array([len(prompt) for prompt in prompts])
    depth, width = draft.config.block_size - 1, budget + 1
    capacity = lens.max() + max_new_tokens + max(width, depth + 1)
    cache = target.new_cache(len(prompts), capacity, page_size)
    context = draft.new_cache(len(prompts), capacity, page_size)
    root, out = _prefill(target, prompts, cache)
    for request, length in enumerate(lens):
        _append(draft, context, out, request, request, 0, np.arange(length))
    written = [[int(token)] for token in root]

    while unfinished := [r for r, text in enumerate(written) if len(text) < max_new_tokens]:
        requests = np.array(unfinished)
        starts, roots = lens[requests], root[requests]
        logits = draft.logits(roots, starts, context, requests)
        b, _, vocab = logits.shape
        top = reference.draft_topk(logits.reshape(-1, vocab), min(budget, vocab))
        log_probs = (top.values - top.lse[:, None]).reshape(b, depth, -1)
        built = reference.build_tree(
            top.ids.reshape(b, depth, -1), log_probs, roots, starts, budget
        )
        bits = np.unpackbits(built.ancestors.view(np.uint8), axis=-1, bitorder="little")
        visible = bits[..., :width].astype(bool)
        out = target.forward(built.tokens, built.positions, visible, starts, cache, requests)
        predictions = out.logits.argmax(axis=-1)
        accepted = reference.accept_tree(
            built.tokens,
            built.next_token,
            built.next_sibling,
            built.num_nodes,
            predictions,
            starts,
            depth,
        )
        for row, request in enumerate(requests):
            count = accepted.accept_len[row] + 1
            path = accepted.path[row, :count]
            cache.move(request, path, starts[row])
            _append(draft, context, out, row, request, starts[row], path)
            written[request] += accepted.out_tokens[row, :count].tolist()
        root[requests], lens[requests] = accepted.bonus, accepted.new_seq_lens
        on_step(GoldenStep(requests, built, predictions, accepted))
    return [text[:max_new_tokens] for text in written]


def _prefill(
    target: GoldenTarget, prompts: Sequence[Sequence[int]], cache: Cache
) -> tuple[np.ndarray, Forward]:
    """The first token of each prompt, whose rows are padded at their ends.

    What the pads leave in the cache lies past the prompt, where decoding writes over it.
    """
    lens = np.array([len(prompt) for prompt in prompts])
    b, n = len(prompts), lens.max()
    tokens = np.zeros((b, n), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    positions = np.broadcast_to(np.arange(n), (b, n))
    causal = np.broadcast_to(np.tril(np.ones((n, n), bool)), (b, n, n))
    no_prefix = np.zeros(b, np.int64)
    out = target.forward(tokens, positions, causal, no_prefix, cache, np.arange(b))
    return out.logits[np.arange(b), lens - 1].argmax(axis=-1), out


def _append(
    draft: GoldenDraft,
    context: Cache,
    out: Forward,
    row: int,
    request: int,
    start: int,
    path: np.ndarray,
) -> None:
    """Rows `path` of a request's forward become its drafter's context from position `start` on."""
    states = [state[row : row + 1, path] for state in out.states]
    positions = start + np.arange(len(path))[None]
    draft.append(states, positions, context, np.array([request]))
