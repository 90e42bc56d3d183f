"""Penalties count the tokens of a node's own path: against a loop that plays each node's text."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from kdtree_sglang import ops
from kdtree_sglang.penalties import PathPenalties, is_penalised

VOCABULARY, POOL, EOS = 17, 9, 5


def request(prompt: int, output: list[int], **params) -> SimpleNamespace:
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
    }
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**{**defaults, **params}),
        output_ids=output,
        origin_input_ids=[0] * prompt,
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS),
    )


def penalised(row: np.ndarray, text: list[int], params: SimpleNamespace) -> np.ndarray:
    """One node's logits after `text`, by definition."""
    row = row.astype(np.float32).copy()
    for token in set(text):
        row[token] -= np.float32(params.frequency_penalty) * text.count(token)
        row[token] -= np.float32(params.presence_penalty)
        scale = np.float32(params.repetition_penalty)
        row[token] = row[token] * scale if row[token] < 0 else row[token] / scale
    if len(text) < params.min_new_tokens:
        row[[EOS, *(params.stop_token_ids or [])]] = -np.inf
    return row


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 40), st.integers(1, 5))
def test_nodes_are_penalised_for_their_own_text(seed: int, bs: int, budget: int, depths: int):
    rng = np.random.default_rng(seed)
    # So few tokens that paths repeat them and the committed text.
    k = int(rng.integers(1, 6))
    ids = np.stack([rng.permutation(VOCABULARY)[:k] for _ in range(bs * depths)])
    log_probs = -np.sort(rng.exponential(size=(bs, depths, k)).astype(np.float32))
    choices = [0.0, 0.7, -0.4], [0.0, 0.5], [1.0, 1.4], [0, 3, 12], [None, [7]]
    names = (
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "stop_token_ids",
    )
    reqs, committed = [], []
    for _ in range(bs):
        picks = [options[rng.integers(len(options))] for options in choices]
        text = rng.integers(0, VOCABULARY, rng.integers(1, 10)).tolist()
        # A retracted request comes back with part of its text.
        kept = int(rng.integers(0, len(text)))
        prompt = int(rng.integers(1, 8))
        reqs.append(request(prompt, text[:kept], **dict(zip(names, picks, strict=True))))
        committed.append(text)
    rows = torch.from_numpy(rng.permutation(POOL)[:bs])
    penalties = PathPenalties(POOL, VOCABULARY, "cpu")

    # A prefill gives one token, then a step the rest.
    first = torch.tensor([t[len(r.output_ids)] for r, t in zip(reqs, committed, strict=True)])
    penalties.begin(reqs, rows, first)
    rest = [t[len(r.output_ids) + 1 :] for r, t in zip(reqs, committed, strict=True)]
    width = max(map(len, rest)) + 1
    steps = torch.tensor([[*t, *[EOS] * (width - len(t))] for t in rest])
    penalties.commit(reqs, rows, steps, torch.tensor([len(t) for t in rest]))

    # The root lies where its text ends.
    positions = [len(r.origin_input_ids) + len(t) - 1 for r, t in zip(reqs, committed, strict=True)]
    tree = ops.build_tree(
        torch.from_numpy(ids.reshape(bs, depths, k)),
        torch.from_numpy(log_probs),
        torch.tensor([text[-1] for text in committed]),
        torch.tensor(positions),
        budget,
    )
    logits = torch.from_numpy(rng.standard_normal((bs * (budget + 1), VOCABULARY))).float()
    found = logits.clone()
    penalties.apply(found, reqs, rows, tree)

    for b, req in enumerate(reqs):
        for node in range(int(tree.num_nodes[b])):
            path, walk = [], node
            while walk > 0:
                path.insert(0, int(tree.tokens[b, walk]))
                walk = int(tree.parents[b, walk])
            index = b * (budget + 1) + node
            expected = penalised(logits[index].numpy(), committed[b] + path, req.sampling_params)
            np.testing.assert_allclose(found[index].numpy(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_prefill_after_a_retraction_is_penalised_for_the_text_so_far(seed: int, bs: int):
    rng = np.random.default_rng(seed)
    reqs = [
        request(
            3,
            rng.integers(0, VOCABULARY, rng.integers(0, 8)).tolist(),
            frequency_penalty=float(rng.choice([0.0, 0.7])),
            presence_penalty=float(rng.choice([0.0, -0.4])),
            repetition_penalty=float(rng.choice([1.0, 1.4])),
            min_new_tokens=int(rng.choice([0, 3])),
        )
        for _ in range(bs)
    ]
    logits = torch.from_numpy(rng.standard_normal((bs, VOCABULARY))).float()
    expected = [
        penalised(row, req.output_ids, req.sampling_params)
        for row, req in zip(logits.numpy(), reqs, strict=True)
    ]
    untouched = sampling_info(bs)
    info = PathPenalties(POOL, VOCABULARY, "cpu").resume(untouched, reqs)
    if any(is_penalised(req) and req.output_ids for req in reqs):
        info._apply_pre_grammar_logits_transforms(logits)
        np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-5)
    else:
        assert info is untouched


def sampling_info(bs: int) -> SamplingBatchInfo:
    ones = torch.ones(bs)
    return SamplingBatchInfo(
        temperatures=ones.view(-1, 1),
        top_ps=ones,
        top_ks=ones.int(),
        min_ps=ones * 0,
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCABULARY,
    )


def test_batches_without_penalties_cost_nothing():
    penalties = PathPenalties(POOL, VOCABULARY, "cpu")
    reqs = [request(3, [])]
    penalties.begin(reqs, torch.tensor([1]), torch.tensor([2]))
    assert penalties._counts is None


@pytest.mark.parametrize("row", [0, POOL - 1])
def test_a_new_request_in_a_used_row_starts_over(row: int):
    penalties = PathPenalties(POOL, VOCABULARY, "cpu")
    rows = torch.tensor([row])
    reqs = [request(3, [], presence_penalty=1.0)]
    penalties.begin(reqs, rows, torch.tensor([2]))
    penalties.commit(reqs, rows, torch.tensor([[3, 4]]), torch.tensor([2]))
    penalties.begin(reqs, rows, torch.tensor([6]))
    assert penalties._counts[row].nonzero().flatten().tolist() == [6]
