"""The text of a live server is the text of the FP32 engine, which shares no code with SGLang."""

import functools

import pytest
from server_support import TINY, Setup, held_out_prompts
from transformers import AutoTokenizer

from kdtree_sglang import engine
from kdtree_sglang.live_server import detect_device

NEW_TOKENS = 64


@pytest.mark.skipif(detect_device() == "cuda", reason="a server on a GPU computes in bf16")
@pytest.mark.parametrize(
    "setup",
    [Setup("mla"), Setup("mla", "ddtree-native", page_size=16, budget=16)],
    ids=str,
)
def test_server_writes_the_engines_text(servers, setup):
    answers = servers.answers(setup)
    different = [
        number
        for number, (answer, tokens) in enumerate(zip(answers, engine_texts(), strict=True))
        if answer.ids != tokens
    ]
    assert not different, f"prompts {different}"


@functools.cache
def engine_texts() -> list[list[int]]:
    folder = TINY / "mla"
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    prompts = [tokenizer.encode(prompt) for prompt in held_out_prompts()]
    target = engine.Target.load(folder / "target")
    draft = engine.Draft.load(folder / "draft", target)
    texts = engine.generate(target, prompts, NEW_TOKENS, mode="tree", draft=draft, page_size=16)
    return [text.tokens for text in texts]
