"""Options and refusals, through SGLang's own argument resolution.

Each case is resolved as the launcher would resolve it; the refusal's exact message is the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdtree_sglang import config, cpu_sglang
from kdtree_sglang.attention import registry

TINY = Path(__file__).parents[2] / "examples" / "tiny"
TARGET, DRAFT = str(TINY / "mla" / "target"), str(TINY / "mla" / "draft")
GQA_DRAFT = str(TINY / "gqa" / "draft")
DRIVER = Path(__file__).with_name("resolve_driver.py")

BASE = ["--model-path", TARGET, "--speculative-algorithm", "ddtree-native"]
WITH_DRAFT = [*BASE, "--speculative-draft-model-path", DRAFT]
ON_CPU = cpu_sglang.server_flags()


def resolve(cases: list[list[str]], **variables: str) -> list[dict]:
    """Run the driver on a CPU-only SGLang; one result a case."""
    environment = {**os.environ, **cpu_sglang.environment(), **variables}
    done = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps(cases),
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def edited_model(folder: Path, source: str, **changes: object) -> str:
    """A checkpoint folder with `source`'s config, some of its fields changed, and no weights."""
    folder.mkdir()
    config = json.loads((Path(source) / "config.json").read_text())
    for key, value in changes.items():
        if isinstance(value, dict):
            config[key] = {**config[key], **value}
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(Path(source) / name)
    return str(folder)


def refusals(tmp: Path) -> dict[str, tuple[list[str], str]]:
    """Case name -> (arguments, the message that the launcher must end with)."""
    small_vocabulary = edited_model(tmp / "vocabulary", DRAFT, vocab_size=1000)
    narrow = edited_model(tmp / "narrow", DRAFT, hidden_size=64)
    head = {
        "projector_type": "domino",
        "shift_label": False,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 64,
        "emb_dim": 64,
    }
    domino = edited_model(tmp / "domino", DRAFT, dflash_config=head)
    no_block = json.loads((Path(DRAFT) / "config.json").read_text())
    assert no_block["block_size"] == 8
    cases = {
        "missing draft path": (
            [*BASE, *ON_CPU],
            "--speculative-draft-model-path is missing: trees are drafted by a DFlash checkpoint. "
            "Fix: --speculative-draft-model-path DRAFT.",
        ),
        "not a DFlash draft": (
            [*BASE, "--speculative-draft-model-path", TARGET, *ON_CPU],
            f"--speculative-draft-model-path {TARGET}: its architecture is "
            "['DeepseekV3ForCausalLM']. Fix: a DFlashDraftModel checkpoint.",
        ),
        "draft vocabulary": (
            [*BASE, "--speculative-draft-model-path", small_vocabulary, *ON_CPU],
            f"--speculative-draft-model-path {small_vocabulary}: its vocabulary is 1000, the "
            "target's is 2048. Fix: the draft that was trained for this target.",
        ),
        "draft hidden size": (
            [*BASE, "--speculative-draft-model-path", narrow, *ON_CPU],
            f"--speculative-draft-model-path {narrow}: its hidden size is 64, the target's is 256. "
            "Fix: the draft that was trained for this target.",
        ),
        "Domino draft": (
            [*BASE, "--speculative-draft-model-path", domino, *ON_CPU],
            f"--speculative-draft-model-path {domino}: its candidate head proposes a chain of its "
            "own. Fix: a plain DFlash checkpoint, or --speculative-algorithm DFLASH.",
        ),
        "budget 0": (
            [*WITH_DRAFT, *ON_CPU, "--speculative-num-draft-tokens", "1"],
            "--speculative-num-draft-tokens 1: it counts the root, so the budget would be 0; "
            "1..127 are served. Fix: --speculative-num-draft-tokens 2..128.",
        ),
        "budget 128": (
            [*WITH_DRAFT, *ON_CPU, "--speculative-num-draft-tokens", "129"],
            "--speculative-num-draft-tokens 129: it counts the root, so the budget would be 128; "
            "1..127 are served. Fix: --speculative-num-draft-tokens 2..128.",
        ),
        "block size 1": (
            [*WITH_DRAFT, *ON_CPU, "--speculative-dflash-block-size", "1"],
            "--speculative-dflash-block-size 1: the block holds the anchor and 1..15 drafts. "
            "Fix: a block size of 2..16.",
        ),
        "block size 17": (
            [*WITH_DRAFT, *ON_CPU, "--speculative-dflash-block-size", "17"],
            "--speculative-dflash-block-size 17: the block holds the anchor and 1..15 drafts. "
            "Fix: a block size of 2..16.",
        ),
    }
    for count in ("0", "128"):
        cases[f"candidates {count}"] = (
            [*WITH_DRAFT, *ON_CPU, "--speculative-eagle-topk", count],
            f"--speculative-eagle-topk {count}: 1..127 candidates a depth are served. "
            "Fix: leave it out (the budget is the exact tree's number).",
        )
    return cases


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict]]:
    cases = refusals(tmp_path_factory.mktemp("models"))
    results = resolve([arguments for arguments, _ in cases.values()])
    return {name: (cases[name][1], result) for name, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize(
    "name",
    [
        "missing draft path",
        "not a DFlash draft",
        "draft vocabulary",
        "draft hidden size",
        "Domino draft",
        "budget 0",
        "budget 128",
        "block size 1",
        "block size 17",
        "candidates 0",
        "candidates 128",
    ],
)
def test_sizes_and_models_are_refused(refused: dict, name: str) -> None:
    message, result = refused[name]
    assert result == {"error": f"Refusal: DDTREE-NATIVE: {message}"}


FLAGS = [
    (["--pp-size", "2"], "--pp-size 2: not supported with draft trees yet. Fix: --pp-size 1."),
    (["--tp-size", "2"], "--tp-size 2: not supported with draft trees yet. Fix: --tp-size 1."),
    (
        ["--disaggregation-mode", "decode"],
        "--disaggregation-mode decode: not supported with draft trees yet. Fix: leave it out.",
    ),
    (
        ["--enable-hierarchical-cache"],
        "--enable-hierarchical-cache: not supported with draft trees yet. Fix: leave it out.",
    ),
    (
        ["--enable-mixed-chunk"],
        "--enable-mixed-chunk: not supported with draft trees yet. Fix: leave it out.",
    ),
    (
        ["--enable-strict-thinking", "--reasoning-parser", "qwen3"],
        "--enable-strict-thinking: not supported with draft trees yet. Fix: leave it out.",
    ),
    (
        ["--speculative-draft-window-size", "64"],
        "--speculative-draft-window-size: not supported with draft trees yet. Fix: leave it out.",
    ),
]


@pytest.fixture(scope="module")
def refused_flags() -> list[dict]:
    return resolve([[*WITH_DRAFT, *ON_CPU, *flags] for flags, _ in FLAGS])


@pytest.mark.parametrize("index", range(len(FLAGS)), ids=[flags[0] for flags, _ in FLAGS])
def test_features_are_refused_by_their_flag(refused_flags: list[dict], index: int) -> None:
    assert refused_flags[index] == {"error": f"Refusal: DDTREE-NATIVE: {FLAGS[index][1]}"}


OPTIONS = {
    "defaults": ([], {"num_draft_tokens": 17, "block": 8, "candidates": "16"}),
    "budget": (
        ["--speculative-num-draft-tokens", "33"],
        {"num_draft_tokens": 33, "block": 8, "candidates": "32"},
    ),
    "block size": (
        ["--speculative-dflash-block-size", "4"],
        {"num_draft_tokens": 9, "block": 4, "candidates": "8"},
    ),
    "candidates": (
        ["--speculative-eagle-topk", "5"],
        {"num_draft_tokens": 17, "block": 8, "candidates": "5"},
    ),
    "one candidate": (
        ["--speculative-eagle-topk", "1"],
        {"num_draft_tokens": 17, "block": 8, "candidates": "1"},
    ),
}


@pytest.fixture(scope="module")
def resolved() -> dict[str, dict]:
    results = resolve([[*WITH_DRAFT, *ON_CPU, *flags] for flags, _ in OPTIONS.values()])
    return dict(zip(OPTIONS, results, strict=True))


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options_land_where_sglang_reads_them(resolved: dict[str, dict], name: str) -> None:
    assert "fields" in resolved[name], resolved[name]
    fields, expected = resolved[name]["fields"], OPTIONS[name][1]
    assert fields["speculative_algorithm"] == "DDTREE-NATIVE"
    assert fields["speculative_num_draft_tokens"] == expected["num_draft_tokens"]
    assert fields["speculative_dflash_block_size"] == expected["block"]
    assert fields["candidates"] == expected["candidates"]
    # Above 1 it would change SGLang's KV allocation.
    assert fields["speculative_eagle_topk"] == 1
    assert fields["speculative_num_steps"] == 1
    assert fields["speculative_draft_attention_backend"] == "torch_native"
    assert fields["max_running_requests"] == 48


def test_another_sglang_is_refused_by_version_and_override() -> None:
    # The plug-in compares with its own constant, so the test moves that, not SGLang.
    code = (
        "import kdtree_sglang, sys; kdtree_sglang.SGLANG_VERSION = '0.5.99';"
        f"sys.argv = ['driver']; import runpy; runpy.run_path({str(DRIVER)!r}, run_name='__main__')"
    )
    case = json.dumps([[*WITH_DRAFT, *ON_CPU]])

    def run(**variables: str) -> dict:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=case,
            env={**os.environ, **cpu_sglang.environment(), **variables},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])[0]

    assert run() == {
        "error": "RuntimeError: DDTREE-NATIVE cannot be used: SGLang 0.5.23 is not the release "
        "this plug-in is tested with (0.5.99). Fix: pip install sglang==0.5.99, or set "
        "DDTREE_ALLOW_SGLANG=0.5.23 to run on it untested."
    }
    assert "fields" in run(DDTREE_ALLOW_SGLANG="0.5.23")


BACKENDS = [
    ({"attention_backend": name}, f"--attention-backend {name}")
    for name in ("flashmla", "fa3", "trtllm_mla", "cutedsl_mla", "torch_native")
] + [
    # The half that verifies is the prefill's, unless --speculative-attention-mode decode.
    (
        {"prefill_attention_backend": "fa3", "decode_attention_backend": "triton"},
        "--prefill-attention-backend fa3",
    ),
    (
        {
            "prefill_attention_backend": "triton",
            "decode_attention_backend": "flashmla",
            "speculative_attention_mode": "decode",
        },
        "--decode-attention-backend flashmla",
    ),
]


HYBRIDS = {
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
    "nemotron_h": {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"},
    "falcon_h1": {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"},
}


@pytest.mark.parametrize("model_type", list(HYBRIDS))
def test_a_hybrid_target_is_refused(tmp_path: Path, model_type: str) -> None:
    sizes = {"vocab_size": 2048, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({**HYBRIDS[model_type], **sizes}))
    args = SimpleNamespace(
        model_path=str(tmp_path),
        revision=None,
        speculative_draft_model_path=DRAFT,
        speculative_draft_model_revision=None,
        trust_remote_code=False,
        json_model_override_args="{}",
    )
    with pytest.raises(config.Refusal) as refusal:
        config._check_models(args)
    assert str(refusal.value) == (
        f"DDTREE-NATIVE: --model-path {tmp_path}: hybrid (Mamba, linear-attention) targets commit "
        "their state along a chain. Fix: --speculative-algorithm DFLASH."
    )


def _cuda_attention(**chosen: str) -> SimpleNamespace:
    """The fields that the attention check reads, as resolution leaves them on a GPU machine."""
    fields = {
        "device": "cuda",
        "attention_backend": None,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "speculative_attention_mode": "prefill",
        "speculative_draft_attention_backend": None,
    }
    return SimpleNamespace(**{**fields, **chosen})


@pytest.mark.parametrize(("chosen", "flag"), BACKENDS, ids=[flag for _, flag in BACKENDS])
def test_a_backend_that_would_verify_causally_is_refused_by_name(chosen: dict, flag: str) -> None:
    with pytest.raises(config.Refusal) as refusal:
        config._check_attention(_cuda_attention(**chosen))
    assert str(refusal.value) == (
        f"DDTREE-NATIVE: {flag}: the target's verify runs on it, and it would put a causal mask "
        f"over the tree. Fix: {flag.split()[0]} triton or flashinfer."
    )
    # The fix must be accepted.
    field = flag.split()[0].removeprefix("--").replace("-", "_")
    config._check_attention(_cuda_attention(**{**chosen, field: "triton"}))


def test_flashinfer_is_refused_for_an_mla_target() -> None:
    runner = SimpleNamespace(
        spec_algorithm=SimpleNamespace(name="DDTREE-NATIVE"),
        is_draft_worker=False,
        use_mla_backend=True,
    )
    stock = pytest.fail
    factory = registry._for_our_target(registry._create_flashinfer, stock=stock)
    with pytest.raises(config.Refusal) as refusal:
        factory(runner)
    assert str(refusal.value) == (
        "DDTREE-NATIVE: --attention-backend flashinfer: on an MLA target it verifies with a causal "
        "mask. Fix: --attention-backend triton."
    )


@pytest.mark.parametrize(
    "chosen",
    [
        {"attention_backend": "triton"},
        {"prefill_attention_backend": "triton", "decode_attention_backend": "flashmla"},
        {
            "prefill_attention_backend": "fa3",
            "decode_attention_backend": "triton",
            "speculative_attention_mode": "decode",
        },
    ],
)
def test_the_half_that_verifies_decides(chosen: dict) -> None:
    config._check_attention(_cuda_attention(**chosen))


def test_a_failed_build_stops_the_launcher_with_the_compilers_message(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-compiler"
    # torch asks a compiler for its version before it uses it.
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *version*) exec c++ "$@" ;; esac\n'
        "echo 'fatal error: the compiler is out of order' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    [result] = resolve(
        [[*WITH_DRAFT, *ON_CPU]], CXX=str(compiler), KDTREE_CACHE_DIR=str(tmp_path / "cache")
    )
    assert result["error"].startswith("ExtensionBuildError")
    assert "the compiler is out of order" in result["error"]
