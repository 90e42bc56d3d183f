"""One text: trees, chains, single tokens, numpy and transformers, token for token."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from engine_support import BUDGETS, NEW_TOKENS, PAIR, TINY, assert_same_texts, padded

from kdtree_sglang import engine
from kdtree_sglang.engine import golden_loops

# A golden tree is compared node for node only where rounding cannot have changed its order: two
# implementations' log-masses differ by about 1e-5.
CLEAR_GAP = 1e-4


@pytest.fixture(scope="module")
def drafted(pair, prompts):
    """Generations by mode, budget and page size, each made once."""
    target, draft = pair
    made = {}

    def generate(mode: str, budget: int = 16, page_size: int = 1) -> list[engine.Generation]:
        key = (mode, budget, page_size)
        if key not in made:
            made[key] = engine.generate(
                target,
                prompts,
                NEW_TOKENS,
                mode=mode,
                draft=draft,
                budget=budget,
                page_size=page_size,
            )
        return made[key]

    return generate


def tokens_of(generations: list[engine.Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


def accept_length(generations: list[engine.Generation]) -> float:
    steps = [count for generation in generations for count in generation.committed]
    return sum(steps) / len(steps)


def test_texts_are_many_and_whole(plain_texts):
    assert [len(text) for text in plain_texts] == [NEW_TOKENS] * 50
    assert len({tuple(text) for text in plain_texts}) > 45


def test_pages_do_not_change_the_text(drafted, plain_texts):
    assert_same_texts(tokens_of(drafted("ar", page_size=64)), plain_texts)


@pytest.mark.parametrize("page_size", [1, 64])
def test_chain(drafted, plain_texts, page_size):
    assert_same_texts(tokens_of(drafted("chain", page_size=page_size)), plain_texts)


# 63 nodes and the root fill a mask word; 63 is also the widest tree by far, so it runs once.
@pytest.mark.parametrize("budget, page_size", [(8, 1), (8, 64), (16, 64), (32, 1), (63, 64)])
def test_tree(drafted, plain_texts, budget, page_size):
    assert_same_texts(tokens_of(drafted("tree", budget, page_size)), plain_texts)


def test_tree_of_two_mask_words(pair, prompts, plain_texts):
    texts = engine.generate(*pair[:1], prompts[:8], 16, mode="tree", draft=pair[1], budget=127)
    assert_same_texts(tokens_of(texts), [text[:16] for text in plain_texts[:8]])


@pytest.fixture(scope="module")
def golden_texts(golden_pair, prompts):
    return golden_loops.autoregressive(golden_pair[0], prompts, NEW_TOKENS)


def test_golden(golden_texts, plain_texts):
    assert_same_texts(golden_texts, plain_texts)


def test_transformers_writes_it(transformers_model, prompts, plain_texts):
    """Each token is transformers' argmax after all that precede it: its greedy text is this one."""
    sequences = [prompt + text for prompt, text in zip(prompts, plain_texts, strict=True)]
    with torch.no_grad():
        best = transformers_model(padded(sequences)).logits.argmax(dim=-1)
    texts = [
        row[len(prompt) - 1 : len(prompt) - 1 + NEW_TOKENS].tolist()
        for row, prompt in zip(best, prompts, strict=True)
    ]
    assert_same_texts(texts, plain_texts)


def test_transformers_generates_it(transformers_model, prompts, plain_texts):
    """The same through transformers' own loop and cache, for a few prompts."""
    texts = [
        transformers_model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in prompts[:4]
    ]
    assert_same_texts(texts, plain_texts[:4])


def test_a_request_does_not_depend_on_its_batch(pair, prompts, plain_texts):
    """Alone, and after another order: page tables and paddings are then others."""
    target, draft = pair
    some = [prompts[i] for i in (7, 3, 11)]
    expected = [plain_texts[i] for i in (7, 3, 11)]
    for page_size in (1, 5):
        together = engine.generate(
            target, some, NEW_TOKENS, mode="tree", draft=draft, budget=16, page_size=page_size
        )
        assert_same_texts(tokens_of(together), expected)
    alone = engine.generate(target, some[:1], NEW_TOKENS, mode="tree", draft=draft, budget=16)
    assert_same_texts(tokens_of(alone), expected[:1])


def test_wider_trees_commit_more(drafted):
    lengths = [accept_length(drafted("chain"))]
    lengths += [accept_length(drafted("tree", b, 1 if b in (8, 32) else 64)) for b in BUDGETS]
    assert lengths == sorted(lengths), lengths
    assert lengths[0] > 2.5


def test_steps_are_those_of_the_training_code(drafted, prompts, monkeypatch):
    """examples/tiny/train drafts at every position of the finished text and replays the steps."""
    monkeypatch.syspath_prepend(str(TINY / "train"))
    evaluate = importlib.import_module("evaluate")
    models = importlib.import_module("models")
    target, draft = models.load(PAIR / "target"), models.load(PAIR / "draft")
    count = 8
    steps, _ = evaluate.measure(target, draft, prompts[:count], NEW_TOKENS, [16])
    for mode in ("chain", "tree"):
        generations = drafted(mode, 16, 1 if mode == "chain" else 64)[:count]
        replayed = list(steps["chain" if mode == "chain" else 16])
        for generation in generations:
            expected = [replayed.pop(0) for _ in generation.committed]
            # The replay does not cut the last step.
            expected[-1] -= sum(expected) - (NEW_TOKENS - 1)
            assert generation.committed == expected
        assert not replayed


def test_tree_steps_equal_the_golden_ones(pair, golden_pair, prompts):
    """A second implementation of the whole step: numpy's model, the references, numpy's cache."""
    target, draft = pair
    some, budget = prompts[:8], 24
    steps, golden_steps = [], []
    engine.generate(
        target,
        some,
        NEW_TOKENS,
        mode="tree",
        draft=draft,
        budget=budget,
        page_size=64,
        on_step=steps.append,
    )
    golden_loops.tree(*golden_pair, some, NEW_TOKENS, budget, 1, golden_steps.append)

    compared = total = 0
    for step, golden in zip(steps, golden_steps, strict=True):
        got = {name: tensor.cpu().numpy() for name, tensor in step.tensors.items()}
        np.testing.assert_array_equal(step.requests.cpu().numpy(), golden.requests)
        # What is committed is equal in any case; the rest where no two keys all but tie.
        for name in ("accept_len", "out_tokens", "bonus", "new_seq_lens"):
            np.testing.assert_array_equal(got[name], getattr(golden.accepted, name))
        for row in range(len(golden.requests)):
            mass = golden.tree.log_mass[row, : golden.tree.num_nodes[row]]
            total += 1
            if np.diff(mass).max() > -CLEAR_GAP:
                continue
            compared += 1
            np.testing.assert_allclose(got["log_mass"][row], golden.tree.log_mass[row], atol=5e-5)
            for name in golden.tree._fields:
                if name != "log_mass":
                    np.testing.assert_array_equal(got[name][row], getattr(golden.tree, name)[row])
            np.testing.assert_array_equal(got["predictions"][row], golden.predictions[row])
            np.testing.assert_array_equal(got["path"][row], golden.accepted.path[row])
    assert compared > 0.9 * total, (compared, total)


def test_sglang_is_not_imported():
    code = "import sys, kdtree_sglang.engine; sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
