"""What SGLang's plug-in loader runs in every process of a CPU server.

Six adaptations, numbered in the order in which a server meets them. Each one concerns DFlash
drafting or DeepSeek attention on a CPU; none changes what a token is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VERIFIED_SGLANG = "0.5.23"
BACKEND = "torch_native"


def apply() -> None:
    """Entry point of group `sglang.srt.plugins`.

    The loader only logs exceptions, and a half-adapted server fails later in puzzling ways, so a
    failure here ends the process with its cause.
    """
    try:
        _require_verified_sglang()
        _ignore_record_stream()
        _admit_dflash()
        _admit_draft_backend()
        _register_verify_attention()
        _dispatch_mla()
        _keep_embedding_dtype()
    except Exception as error:
        raise SystemExit(f"kdtree_sglang.cpu_sglang cannot adapt this SGLang: {error!r}") from error


def _require_verified_sglang() -> None:
    import sglang

    if sglang.__version__ != VERIFIED_SGLANG:
        raise RuntimeError(f"written for {VERIFIED_SGLANG}, found {sglang.__version__}")


def _ignore_record_stream() -> None:
    """0. `record_stream` rejects the dummy stream of `torch.cpu`; there is nothing to record."""
    stock = torch.Tensor.record_stream

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if self.is_cuda:
            stock(self, stream)

    torch.Tensor.record_stream = record_stream


class _AcceleratorView:
    """A resolution view that answers "npu" for the device and everything else as it is."""

    def __init__(self, view: Any):
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return "npu" if name == "device" else getattr(self._view, name)


def _admit_dflash() -> None:
    """1. `_handle_dflash` accepts CUDA, NPU and XPU only; its body needs none of them."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(stock: Callable[[Any], None], server_args: Any) -> None:
        view = speculative_hook.resolving_view
        speculative_hook.resolving_view = lambda args: _AcceleratorView(view(args))
        try:
            stock(server_args)
        finally:
            speculative_hook.resolving_view = view

    HookRegistry.register(
        "sglang.srt.arg_groups.speculative_hook._handle_dflash", around, HookType.AROUND
    )


def _admit_draft_backend() -> None:
    """2. A draft backend outside this list is replaced by flashinfer."""
    from sglang.srt.arg_groups import choices

    if BACKEND not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([BACKEND])


def _register_verify_attention() -> None:
    """3. `torch_native` has no TARGET_VERIFY; see backend.py."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(BACKEND)
    def create(runner: Any) -> Any:
        from kdtree_sglang.cpu_sglang.backend import VerifyTorchNativeBackend

        return VerifyTorchNativeBackend(runner)


def _dispatch_mla() -> None:
    """4. `torch_native` reads the latent KV cache, so DeepSeek must always use its MLA form."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(BACKEND, lambda attn, batch: AttnForwardMethod.MLA)


def _keep_embedding_dtype() -> None:
    """5. Draft blocks arrive as embeddings, which the runner casts to bf16 whatever the model's
    dtype is; an fp32 drafter then fails on mixed dtypes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(
        stock: Callable[..., dict[str, Any]], runner: Any, forward_batch: Any, *args: Any
    ) -> dict[str, Any]:
        kwargs = stock(runner, forward_batch, *args)
        # Replaced embeddings were scattered into the cast copy, which no DFlash draft uses.
        if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
            kwargs["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)
        return kwargs

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        around,
        HookType.AROUND,
    )
