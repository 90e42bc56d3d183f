"""The live server's failure paths and the demo's verdict, which no healthy server shows."""

import os
from pathlib import Path

import pytest

from kdtree_sglang.cli import demo
from kdtree_sglang.live_server import Generation, LiveServer, ServerError, accept_length


def generation(ids, steps=None):
    meta = {"completion_tokens": len(ids), "finish_reason": {"type": "length"}}
    if steps is not None:
        meta["spec_verify_ct"] = steps
    return Generation(ids=ids, text=str(ids), meta=meta)


def test_accept_length_leaves_the_prefill_token_out():
    assert accept_length([generation([1, 2, 3])]) == 1.0
    assert accept_length([generation([1, 2, 3, 4, 5], steps=2), generation([1, 2], steps=1)]) == (
        pytest.approx(5 / 3)
    )


def test_failed_start_names_its_cause_and_leaves_no_process(tmp_path):
    server = LiveServer(
        ["--model-path", "none", "--no-such-flag"],
        log_path=tmp_path / "log",
        device="cpu",
        start_timeout=120,
    )
    with pytest.raises(ServerError, match="no-such-flag") as failure:
        server.start()
    assert "exited with status" in str(failure.value)
    assert not server.is_running()
    members = []
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = stat.read_bytes()
        except OSError:
            continue
        if b"--no-such-flag" in command:
            members.append(command)
    assert not members


@pytest.mark.parametrize(("tree_ids", "status"), [([1, 2, 3], 0), ([1, 2, 4], 1)])
def test_demo_fails_where_a_text_differs(monkeypatch, capsys, tmp_path, tree_ids, status):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "text": "Once"}\n')
    monkeypatch.setattr(demo.tempfile, "mkdtemp", lambda **_: str(tmp_path / "logs"))
    os.mkdir(tmp_path / "logs")

    def run(name, flags, *_):
        ids = tree_ids if "ddtree-native" in flags else [1, 2, 3]
        return demo.Run(name, [generation(ids, None if name == "plain" else 1)], seconds=1.0)

    monkeypatch.setattr(demo, "_run", run)
    argv = ["--model-path", "target", "--draft-path", "draft", "--prompts", str(prompts)]
    assert demo.main([*argv, "--device", "cpu"]) == status
    output = capsys.readouterr()
    assert f"{1 - status} of 1" in output.out
    assert ("differs on prompt 0" in output.err) == bool(status)


@pytest.mark.parametrize(
    ("tree_ids", "gap", "verdict"),
    [
        ([1, 2, 3], 0.0, "1 of 1"),
        ([1, 9, 3], 0.1, "0 of 1, 1 near ties (<= 0.10 nats)"),
        ([1, 7, 3], 0.1, "0 of 1, 1 near ties (<= 0.20 nats)"),
        ([1, 9, 3], 1.0, "0 of 1"),
        ([1, 8, 3], 0.1, "0 of 1"),  # not among the best
        ([1, 2], 0.1, "0 of 1"),  # only shorter
    ],
)
def test_only_near_ties_excuse_a_difference_in_bf16(tree_ids, gap, verdict):
    best = [[-1.0, 2, None], [-1.0 - gap, 9, None], [-1.0 - 2 * gap, 7, None]]
    scored = generation([1, 2, 3])
    scored.meta["output_top_logprobs"] = [best] * 3
    plain = demo.Run("plain", [generation([1, 2, 3])], seconds=1.0, scored=[scored])
    tree = demo.Run("ddtree-native", [generation(tree_ids, 1)], seconds=1.0)
    assert demo._verdict(tree, plain) == verdict
    assert bool(tree.differences(plain).wrong) == (tree_ids != [1, 2, 3] and "near" not in verdict)
