"""Logits and hidden states of both models within 1e-4 of transformers', in float32."""

import numpy as np
import pytest
import torch
from engine_support import LOGIT_TOLERANCE, golden_prefill, padded, prefill

from kdtree_sglang.engine.model import Rows


@pytest.fixture(scope="module")
def judged(transformers_model, prompts):
    """Some prompts, and transformers' logits and states after each layer."""
    some = [prompts[i] for i in (0, 5, 17, 23, 42)]
    with torch.no_grad():
        out = transformers_model(padded(some), output_hidden_states=True)
    # The last of them is normalised.
    return some, out.logits, out.hidden_states[1:-1]


@pytest.mark.parametrize("page_size", [1, 64])
def test_torch(pair, judged, page_size):
    some, logits, states = judged
    got, out = prefill(pair[0], some, page_size)[:2]
    for row, prompt in enumerate(some):
        written = slice(len(prompt))
        difference = got[row, written].cpu() - logits[row, written]
        assert difference.abs().max() <= LOGIT_TOLERANCE
        for mine, theirs in zip(out.states[:-1], states, strict=True):
            difference = mine[row, written].cpu() - theirs[row, written]
            assert difference.abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("page_size", [1, 64])
def test_golden(golden_pair, judged, page_size):
    some, logits, states = judged
    out = golden_prefill(golden_pair[0], some, page_size)
    for row, prompt in enumerate(some):
        written = slice(len(prompt))
        difference = out.logits[row, written] - logits[row, written].numpy()
        assert np.abs(difference).max() <= LOGIT_TOLERANCE
        for mine, theirs in zip(out.states[:-1], states, strict=True):
            difference = mine[row, written] - theirs[row, written].numpy()
            assert np.abs(difference).max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("nodes", [2, 33, 100])
@pytest.mark.parametrize("page_size", [1, 64])
def test_every_node_of_a_tree_sees_its_path(pair, transformers_model, prompts, nodes, page_size):
    """A node's logits are transformers' after the prefix and the node's path, root included."""
    target = pair[0]
    rng = np.random.default_rng(nodes)
    some = [prompts[2][:1], prompts[3][:63], prompts[4][:80]]
    _, _, cache, table = prefill(target, some, page_size, capacity=80 + nodes)

    tokens = rng.integers(4, 2048, (3, nodes))
    paths = [[[0]] for _ in some]
    for request in paths:
        for node in range(1, nodes):
            request.append([*request[rng.integers(max(0, node - 12), node)], node])
    ancestors = np.zeros((3, nodes, (nodes + 63) // 64), np.uint64)
    for request, row in zip(paths, ancestors, strict=True):
        for path, words in zip(request, row, strict=True):
            for node in path:
                words[node // 64] |= np.uint64(1) << np.uint64(node % 64)
    lens = torch.tensor([len(prompt) for prompt in some], device=target.device)
    depths = np.array([[len(path) - 1 for path in request] for request in paths])
    requests = torch.arange(3, device=target.device)
    rows = Rows(
        tokens=torch.from_numpy(tokens).to(target.device),
        positions=lens[:, None] + torch.from_numpy(depths).to(target.device),
        prefix_lens=lens,
        slots=table.first_slots(requests, 80 + nodes),
        ancestors=torch.from_numpy(ancestors.view(np.int64)).to(target.device),
    )
    with torch.inference_mode():
        logits = target.logits(target.forward(rows, cache).hidden).cpu()

    for request, prompt in enumerate(some):
        texts = [prompt + tokens[request, path].tolist() for path in paths[request]]
        last = [len(text) - 1 for text in texts]
        with torch.no_grad():
            expected = transformers_model(padded(texts)).logits[range(nodes), last]
        assert (logits[request] - expected).abs().max() <= LOGIT_TOLERANCE
