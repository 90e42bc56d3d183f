"""Puts tree-capable attention behind SGLang's own backend names.

New names would miss SGLang's flag choices, page-size rules and DeepSeek dispatch tables, so the
stock factories are wrapped: the target of DDTREE-NATIVE gets our subclass, everyone else stock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdtree_sglang.config import Refusal
from kdtree_sglang.plugin import ALGORITHM


def register() -> None:
    """Wrap the factories (seam: srt/layers/attention/attention_registry.py, ATTENTION_BACKENDS)."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name, create in (("triton", _create_triton), ("flashinfer", _create_flashinfer)):
        ATTENTION_BACKENDS[name] = _for_our_target(create, stock=ATTENTION_BACKENDS[name])


def _for_our_target(
    create: Callable[[Any], Any], stock: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    def factory(runner: Any) -> Any:
        ours = getattr(runner.spec_algorithm, "name", None) == ALGORITHM
        return create(runner) if ours and not runner.is_draft_worker else stock(runner)

    return factory


def _create_triton(runner: Any) -> Any:
    from kdtree_sglang.attention.masked import DDTreeTritonAttnBackend

    return DDTreeTritonAttnBackend(runner)


def _create_flashinfer(runner: Any) -> Any:
    if runner.use_mla_backend:
        raise Refusal(
            "--attention-backend flashinfer",
            "on an MLA target it verifies with a causal mask.",
            "--attention-backend triton",
        )
    from kdtree_sglang.attention.masked import DDTreeFlashInferAttnBackend

    return DDTreeFlashInferAttnBackend(runner, init_new_workspace=runner.init_new_workspace)
