"""Fixtures of the live-server tests; what they share is in server_support.py.

On a GPU the same tests run on its attention backend and carry the marker `gpu`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_support import HERE, REPORT, Servers, held_out_prompts

from kdtree_sglang.live_server import detect_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = detect_device() == "cuda"
    for item in items:
        if HERE in item.path.parents and "servers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.server)
            if on_gpu:
                item.add_marker(pytest.mark.gpu)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not REPORT:
        return
    terminalreporter.section("live servers")
    for entry in REPORT:
        terminalreporter.write_line(
            f"{entry['server']:40} accept length {entry['accept_length']:.2f}, "
            f"{entry['verify_steps']} steps, start {entry['start_seconds']:.0f} s, "
            f"{entry['prompts']} prompts in {entry['seconds']:.1f} s"
        )
    if path := os.environ.get("KDTREE_LIVE_REPORT"):
        Path(path).write_text("".join(json.dumps(entry) + "\n" for entry in REPORT))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    manager = Servers(tmp_path_factory.mktemp("servers"))
    yield manager
    manager.close()


@pytest.fixture(scope="session")
def prompts() -> tuple[str, ...]:
    return held_out_prompts()
