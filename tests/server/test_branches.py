"""Branches matter: every node sees its ancestors and nothing else.

A probe plug-in (probe/kdtree_probe.py) verifies the live server's trees again in altered forms. On
a GPU the server replays CUDA graphs, so these are also the tests that a captured graph keeps its
mask: the field's classic failure runs causal attention there and shows only as a lower accept
length.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from server_support import HERE, Setup

from kdtree_sglang.live_server import LiveServer, detect_device

DEVICE = detect_device()
# Of the logits' scale: fp32 sums in another order on a CPU, bf16 rounding on a GPU.
TOLERANCE = 1e-5 if DEVICE == "cpu" else 3e-2
SETUPS = [Setup("mla", "ddtree-native", 16, 16), Setup("gqa", "ddtree-native", 1, 63)]
if DEVICE == "cuda":
    flashinfer = ("--attention-backend", "flashinfer")
    SETUPS.append(Setup("gqa", "ddtree-native", 16, 16, flashinfer))


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def records(
    request: pytest.FixtureRequest, servers, prompts, tmp_path_factory: pytest.TempPathFactory
) -> list[dict]:
    servers.close()
    out = tmp_path_factory.mktemp("probe") / "records.json"
    with pytest.MonkeyPatch.context() as patch:
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "probe"), *inherited]))
        patch.setenv("KDTREE_PROBE_OUT", str(out))
        log = Path(out).with_name("server.log")
        flags = request.param.flags(DEVICE)
        if DEVICE == "cuda":
            # Three requests in a graph of four: a padded row must not shift the masks.
            flags += ["--cuda-graph-max-bs-decode", "4"]
        with LiveServer(flags, log_path=log, device=DEVICE) as server:
            server.generate_many(prompts[:3], {"max_new_tokens": 32}, concurrency=3)
    records = json.loads(out.read_text())
    assert len(records) >= 3
    assert all(record["branches"] >= 2 for record in records)
    if DEVICE == "cuda":
        assert all(record["graph"] for record in records)
    return records


def close(record: dict, name: str) -> bool:
    return record[name] <= TOLERANCE * record["scale"]


def test_order_of_brothers_changes_no_logits(records: list[dict]) -> None:
    assert all(close(record, "permuted") for record in records), records


def test_one_request_does_not_reach_another(records: list[dict]) -> None:
    assert any(record["bs"] > 1 for record in records)
    assert all(close(record, "neighbours") for record in records), records


def test_nodes_see_no_token_off_their_path(records: list[dict]) -> None:
    assert all(close(record, "blind_to_token") for record in records), records
    # The same change must reach the nodes below, or this test could not fail.
    assert all(record["sees_token"] > 10 * TOLERANCE * record["scale"] for record in records)


@pytest.mark.skipif(DEVICE != "cpu", reason="stock Triton multiplies hidden rows by zero")
def test_nodes_are_blind_to_nan_off_their_path(records: list[dict]) -> None:
    assert all(close(record, "blind_to_nan") for record in records), records
    assert all(record["nan_descendants"] for record in records)


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_graph_replay_equals_eager(records: list[dict]) -> None:
    assert all(close(record, "eager") for record in records), records
