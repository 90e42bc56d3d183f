"""Sample and walk is lossless: the committed tokens follow the target's law at any draft."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from kdtree_sglang import ops
from kdtree_sglang.predict import predict

VOCABULARY, DEPTHS, BUDGET, DRAWS = 12, 3, 9, 24_000

LAWS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "min-p 0.1": {"min_p": 0.1},
    "top-k 4": {"top_k": 4},
}


def torch_sampler(output, info, return_logprob, top_logprobs, token_ids, positions):
    """SGLang's torch sampling without its server context."""
    probs = torch.softmax(output.next_token_logits.div_(info.temperatures), dim=-1)
    return top_k_top_p_min_p_sampling_from_probs_torch(
        probs, info.top_ks, info.top_ps, info.min_ps, info.need_min_p_sampling, None, positions
    )


def sampling_info(bs: int, law: dict) -> SamplingBatchInfo:
    return SamplingBatchInfo(
        temperatures=torch.full((bs, 1), law.get("temperature", 1.0)),
        top_ps=torch.full((bs,), law.get("top_p", 1.0)),
        top_ks=torch.full((bs,), law.get("top_k", TOP_K_ALL), dtype=torch.int32),
        min_ps=torch.full((bs,), law.get("min_p", 0.0)),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling="top_p" in law,
        need_top_k_sampling="top_k" in law,
        need_min_p_sampling="min_p" in law,
        vocab_size=VOCABULARY,
    )


def target_logits(previous: torch.Tensor) -> torch.Tensor:
    """A target that looks at the last token: `[...]` ids -> `[..., V]` logits."""
    table = np.random.default_rng(5).standard_normal((VOCABULARY, VOCABULARY)) * 1.5
    return torch.from_numpy(table).float()[previous]


def law_after(token: int, law: dict) -> np.ndarray:
    """The exact adjusted distribution, by definition, in float64."""
    logits = target_logits(torch.tensor(token)).double().numpy() / law.get("temperature", 1.0)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    kept = order[(before <= law.get("top_p", 1.0)) & (np.arange(len(p)) < law.get("top_k", 999))]
    mask = np.zeros(len(p), bool)
    mask[kept] = True
    mask &= p >= p.max() * law.get("min_p", 0.0)
    return np.where(mask, p, 0) / p[mask].sum()


def draft(bs: int) -> ops.Tree:
    """One tree, for every request, from a drafter that has a vague idea of the target."""
    rng = np.random.default_rng(6)
    log_probs = np.sort(rng.standard_normal((1, DEPTHS, VOCABULARY)).astype(np.float32) - 2)
    guess = law_after(3, {}) + rng.uniform(0, 0.1, VOCABULARY)
    ids = np.stack([np.argsort(-guess), *(rng.permutation(VOCABULARY) for _ in range(DEPTHS - 1))])
    ids = ids[None]
    return ops.build_tree(
        torch.from_numpy(ids).repeat(bs, 1, 1),
        torch.from_numpy(np.ascontiguousarray(log_probs[..., ::-1])).repeat(bs, 1, 1),
        torch.full((bs,), 3),
        torch.full((bs,), 100),
        BUDGET,
    )


def committed_pairs(tree: ops.Tree, predictions: torch.Tensor, continue_with) -> Counter:
    """The first two tokens of each request; a second step draws where the first gave only one."""
    accepted = ops.accept_tree(
        tree.tokens,
        tree.next_token,
        tree.next_sibling,
        tree.num_nodes,
        predictions,
        torch.full((len(predictions),), 100),
        DEPTHS,
    )
    assert 0.2 < accepted.accept_len.float().mean() < 2.5  # both sides of the walk are in play
    first = accepted.out_tokens[:, 0]
    later = continue_with(first)
    second = torch.where(accepted.accept_len > 0, accepted.out_tokens[:, 1], later)
    return Counter(zip(first.tolist(), second.tolist(), strict=True))


def p_value(pairs: Counter, law: dict) -> float:
    first = law_after(3, law)
    joint = {
        (a, b): first[a] * law_after(a, law)[b] * DRAWS
        for a in range(VOCABULARY)
        for b in range(VOCABULARY)
    }
    assert all(joint[pair] > 0 for pair in pairs), "a token that the law excludes"
    likely = [pair for pair, expected in joint.items() if expected >= 5]
    observed, expected = [pairs[pair] for pair in likely], [joint[pair] for pair in likely]
    rest = DRAWS - sum(expected)
    if rest > 1e-6:
        observed, expected = [*observed, DRAWS - sum(observed)], [*expected, rest]
    return chisquare(observed, expected).pvalue


def draw(tree: ops.Tree, law: dict) -> torch.Tensor:
    logits = target_logits(tree.tokens).reshape(-1, VOCABULARY)
    return predict(torch_sampler, logits, sampling_info(DRAWS, law), tree.positions)


def draw_next(law: dict):
    def after(first: torch.Tensor) -> torch.Tensor:
        info = sampling_info(DRAWS, law)
        return predict(torch_sampler, target_logits(first), info, first.view(-1, 1)).view(-1)

    return after


@pytest.mark.parametrize("name", LAWS)
def test_two_committed_tokens_follow_the_targets_law(name: str) -> None:
    torch.manual_seed(11)
    tree, law = draft(DRAWS), LAWS[name]
    pairs = committed_pairs(tree, draw(tree, law), draw_next(law))
    assert p_value(pairs, law) > 0.001


@pytest.mark.parametrize("name", LAWS)
def test_an_acceptor_that_favours_drafts_fails_it(name: str) -> None:
    """The bias: in one of ten trees the root takes its first child, whatever it drew."""
    torch.manual_seed(11)
    tree, law = draft(DRAWS), LAWS[name]
    predictions = draw(tree, law)
    children = tree.tokens.gather(1, tree.next_token[:, :1].long()).view(-1)
    favoured = torch.rand(DRAWS) < 0.1
    predictions[:, 0] = torch.where(favoured, children, predictions[:, 0])
    pairs = committed_pairs(tree, predictions, draw_next(law))
    assert p_value(pairs, law) < 0.001


def test_greedy_rows_take_the_best_token_beside_drawn_ones() -> None:
    torch.manual_seed(12)
    bs = 64
    logits = torch.randn(bs * (BUDGET + 1), VOCABULARY)
    logits[:, 4] = logits[:, 2] = 9.0  # a tie: argmax takes the smaller id
    info = sampling_info(bs, {"top_k": TOP_K_ALL})
    info.top_ks[::2] = 1
    info.is_any_greedy = True
    predictions = predict(
        torch_sampler, logits.clone(), info, torch.zeros((bs, BUDGET + 1), dtype=torch.int64)
    )
    assert (predictions[::2] == 2).all()
    assert (predictions[1::2] == 4).any()
