"""docs/known-bugs.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_test_exists():
    table = (ROOT / "docs" / "known-bugs.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", table))
    assert len(named) > 20
    for file, function in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {function}(" in path.read_text(encoding="utf-8"), f"{file}::{function}"
