"""Puts tree-capable attention behind SGLang's own backend names.

New names would miss SGLang's flag choices, page-size rules and DeepSeek dispatch tables, so the
stock factories are wrapped: the target of DDTREE-NATIVE gets our subclass, everyone else stock.
"""

from __future__ import annotations

from typing import Any

from kdtree_sglang.plugin import ALGORITHM


def register() -> None:
    """Wrap the factories (seam: srt/layers/attention/attention_registry.py, ATTENTION_BACKENDS)."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    stock = ATTENTION_BACKENDS["triton"]

    def create_triton(runner: Any) -> Any:
        if runner.is_draft_worker or getattr(runner.spec_algorithm, "name", None) != ALGORITHM:
            return stock(runner)
        from kdtree_sglang.attention.masked import DDTreeTritonAttnBackend

        return DDTreeTritonAttnBackend(runner)

    ATTENTION_BACKENDS["triton"] = create_triton
