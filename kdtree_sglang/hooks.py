"""The functions of SGLang that DDTREE-NATIVE changes, and nothing else.

Each hook passes through untouched unless the running algorithm is ours. They are AROUND hooks of
SGLang's own registry, which rebinds every `from X import Y` copy; the worker refuses to start if
one is missing (`assert_applied`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdtree_sglang.plugin import ALGORITHM

# SGLang's launcher imports this module before CUDA is set up, so SGLang is imported in the hooks.


def _is_ours() -> bool:
    from sglang.srt.runtime_context import get_spec

    return (get_spec().speculative_algorithm or "").upper() == ALGORITHM


def _decode_reserve(stock: Callable, reqs: Any, *, reserve: int, page_size: int) -> Any:
    """KV slots kept ahead of each request.

    The stock draft input reserves two verify widths. The draft block writes the same window, so
    where it is wider than the verify, the reserve must follow it (allocation_sizing.py).
    """
    if _is_ours():
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

        reserve = max(reserve, get_alloc_reserve_per_decode())
    return stock(reqs, reserve=reserve, page_size=page_size)


def _row_headroom(stock: Callable) -> int:
    """Columns of a request's slot table beyond the context length.

    At page size 1 stock keeps one width where the reserve spans two, so a request near the context
    limit spills into its neighbour's row (sglang#33579).
    """
    extra = stock()
    if _is_ours():
        from sglang.srt.mem_cache.allocation_sizing import (
            get_alloc_page_size,
            get_alloc_reserve_per_decode,
        )

        extra = max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)
    return extra


def _dummy_verify_input(stock: Callable, *args: Any, **kwargs: Any) -> Any:
    """Warm-up batches: stock gives the drafter the verify width; its block is narrower or wider."""
    spec_info = stock(*args, **kwargs)
    if _is_ours() and spec_info is not None:
        import inspect

        from sglang.srt.runtime_context import get_spec

        bound = inspect.signature(stock).bind(*args, **kwargs)
        if bound.arguments["is_draft_worker"]:
            block_size = int(get_spec().speculative_dflash_block_size)
            spec_info.draft_token_num = block_size
            spec_info.num_tokens_per_req = block_size
            spec_info.num_tokens_for_logprob_per_req = block_size
    return spec_info


def _validate_request(stock: Callable, req: Any, enable_overlap: bool) -> str | None:
    """The reason for a HTTP 400, or None (seam: srt/managers/scheduler.py)."""
    error = stock(req, enable_overlap)
    if error is None and _is_ours():
        from kdtree_sglang.config import unsupported_request

        error = unsupported_request(req)
    return error


HOOKS: dict[str, Callable] = {
    "sglang.srt.mem_cache.allocation_sizing.page_aligned_decode_alloc_lens": _decode_reserve,
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": _row_headroom,
    "sglang.srt.speculative.spec_info.create_dummy_verify_input": _dummy_verify_input,
    "sglang.srt.speculative.dflash_utils.validate_dflash_request": _validate_request,
}


def _default_attention(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Where the user named no attention backend, take one that can verify a tree.

    It must stand before the model's own defaults (fa3, flashmla, ...) are filled in
    (seam: srt/arg_groups/pipeline.py, whose order is fixed).
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    from kdtree_sglang.config import TREE_BACKENDS

    cfg = resolving_view(server_args)
    named = (cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend)
    ours = (cfg.speculative_algorithm or "").upper() == ALGORITHM
    if ours and not any(named) and cfg.device in TREE_BACKENDS:
        backend = TREE_BACKENDS[cfg.device][0]
        declare_resolution(server_args, "kdtree_sglang", attention_backend=backend)
    previous(server_args)


def register() -> None:
    """Hand the hooks to SGLang's registries, which apply them after all plug-ins ran."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    register_resolution_hook("handle_model_specific_adjustments")(_default_attention)


def assert_applied() -> None:
    """Raise RuntimeError naming the first hook that SGLang did not apply in this process."""
    import pkgutil

    for target, hook in HOOKS.items():
        function = pkgutil.resolve_name(target)
        # The registry wraps with a closure over the hook; another plug-in may wrap ours again.
        while function is not None:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            if hook in cells:
                break
            function = getattr(function, "__wrapped__", None)
        if function is None:
            raise RuntimeError(
                f"{ALGORITHM}: SGLang did not apply the hook on {target}. "
                "Fix: do not exclude kdtree_sglang from SGLANG_PLUGINS, and call "
                "sglang.srt.plugins.load_plugins() first if you start SGLang from your own script."
            )
