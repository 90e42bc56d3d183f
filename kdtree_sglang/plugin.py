"""What SGLang loads in every process: registers the algorithm and hooks the seams that need it.

SGLang's loader logs a plug-in's exception and goes on, so a broken plug-in would surface as
"unknown speculative algorithm". Here every failure is kept and raised when, and only when,
`--speculative-algorithm ddtree-native` is asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from kdtree_sglang import SGLANG_VERSION

logger = logging.getLogger(__name__)

ALGORITHM = "DDTREE-NATIVE"
# Names the SGLang release that the user vouches for in place of the tested one.
VERSION_OVERRIDE = "DDTREE_ALLOW_SGLANG"


def activate() -> None:
    """Entry point of group `sglang.srt.plugins` (seam: srt/plugins/__init__.py, load_plugins)."""
    try:
        _require_tested_sglang()
        from kdtree_sglang import algorithm, attention, hooks

        hooks.register()
        attention.register()
        algorithm.register()
    except Exception as error:
        try:
            _register_failure(error)
        except Exception:
            # An SGLang without these seams at all: its log is the one place left for the reason.
            logger.exception("%s cannot be used: %s", ALGORITHM, error)


def _require_tested_sglang() -> None:
    import sglang

    found = sglang.__version__
    if found not in (SGLANG_VERSION, os.environ.get(VERSION_OVERRIDE)):
        raise RuntimeError(
            f"SGLang {found} is not the release this plug-in is tested with ({SGLANG_VERSION}). "
            f"Fix: pip install sglang=={SGLANG_VERSION}, or set {VERSION_OVERRIDE}={found} to run "
            "on it untested."
        )


def _register_failure(error: Exception) -> None:
    """Register the name all the same, with a validator that raises what went wrong."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    def refuse(_: Any) -> None:
        raise RuntimeError(f"{ALGORITHM} cannot be used: {error}") from error

    registered = get_spec(ALGORITHM)
    if registered is not None:
        registered.validate_server_args = refuse
        return
    register: Callable[..., Any] = SpeculativeAlgorithm.register
    register(ALGORITHM, supports_overlap=True, validate_server_args=refuse)(refuse)
