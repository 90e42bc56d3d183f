"""kdtree-sglang engine: the text, the steps, and the steps' tensors as KDTR."""

import re

import numpy as np
import pytest
import torch
from engine_support import PAIR
from transformers import AutoTokenizer

from kdtree_sglang import kdtr
from kdtree_sglang.cli import engine

PROMPTS = ("To open a file, use", "The module provides")
TOKENS = 20


def run(capsys, *flags: str) -> tuple[int, str, str]:
    model = ["--model", str(PAIR / "target"), "--device", "cpu", "--max-new-tokens", str(TOKENS)]
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    status = engine.main([*model, *prompts, *flags])
    out, err = capsys.readouterr()
    return status, out, err


def texts(out: str) -> str:
    """What follows the steps, without the counts."""
    return re.sub(r"\d+ tokens, .*", "", out[out.index("\nprompt 0:") :])


def test_modes_print_one_text(capsys):
    draft = ["--draft", str(PAIR / "draft")]
    status, plain, _ = run(capsys)
    assert status == 0
    assert "1.00 a step in 19 steps" in plain
    for flags in (["--mode", "chain"], ["--budget", "5", "--page-size", "1"]):
        status, out, _ = run(capsys, *draft, *flags)
        assert status == 0
        assert texts(out) == texts(plain)
        assert "accepted " in out
    assert all(prompt in texts(plain) for prompt in PROMPTS)


def test_saved_steps(capsys, tmp_path):
    """The files hold the steps that were printed, and those make up the text."""
    folder = tmp_path / "steps"
    flags = ["--draft", str(PAIR / "draft"), "--budget", "8", "--save", str(folder)]
    status, out, _ = run(capsys, *flags)
    assert status == 0
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    files = sorted(folder.iterdir())
    assert len(files) == int(re.findall(r"^step +(\d+)", out, re.MULTILINE)[-1])
    lines = iter(re.findall(r"^step .*", out, re.MULTILINE))
    written = {0: [], 1: []}
    for file in files:
        step = kdtr.read(file)
        b = len(step["requests"])
        assert step["draft_ids"].shape == step["draft_log_probs"].shape == (b, 7, 8)
        assert step["tokens"].shape == step["predictions"].shape == (b, 9)
        assert step["logits"].shape == (b, 9, 2048)
        np.testing.assert_array_equal(step["logits"].argmax(-1), step["predictions"])
        for row, request in enumerate(step["requests"]):
            count = step["accept_len"][row]
            path = step["path"][row, : count + 1]
            np.testing.assert_array_equal(step["parents"][row, path[1:]], path[:-1])
            tokens = step["out_tokens"][row, : count + 1]
            np.testing.assert_array_equal(step["predictions"][row, path], tokens)
            line = next(lines)
            assert f"prompt {request}  accepted {count} of 8 drafts" in line
            assert line.endswith(repr(tokenizer.decode(tokens)))
            if not written[request]:
                written[request].append(step["root"][row])
            written[request].extend(tokens)
    for request, prompt in enumerate(PROMPTS):
        assert prompt + tokenizer.decode(written[request][:TOKENS]) in out

    status, _, err = run(capsys, *flags)
    assert status == 2
    assert "--save" in err


def test_errors(capsys, tmp_path):
    status, _, err = run(capsys, "--budget", "400", "--draft", str(PAIR / "draft"))
    assert status == 2
    assert "budget" in err
    status, _, err = run(capsys, "--draft", str(PAIR / "target"))
    assert status == 2
    assert "architectures" in err
    status, _, err = run(capsys, "--draft", str(tmp_path))
    assert status == 2
    assert "config.json" in err
    with pytest.raises(SystemExit):
        run(capsys, "--mode", "tree")
    assert "--draft" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(capsys):
    with pytest.raises(SystemExit):
        engine.main(["--model", "m", "--prompt", "p", "--device", "cuda"])
    assert "--device cuda" in capsys.readouterr().err
