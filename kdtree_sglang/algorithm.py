"""DDTREE-NATIVE as SGLang's scheduler sees it (seam: srt/speculative/spec_registry.py)."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from kdtree_sglang import config, ops
from kdtree_sglang.plugin import ALGORITHM


class DDTreeAlgorithm(CustomSpecAlgo):
    """A member of the DFLASH family whose verify is wider than its draft block."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        # The worker runs the barrier that advances the grammars, under the verify.
        return True

    def has_draft_kv(self) -> bool:
        # Read by KV sizing alone: draft tokens share the verify window's slots.
        return False

    # The base class lacks the next four, which SGLang calls on every algorithm.
    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        return SpeculativeAlgorithm.DFLASH.create_future_map(*args, **kwargs)

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        return config.current().block_size if is_draft_worker else num_draft_tokens

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int | None:
        """The KV window of a step, which slot and row sizes follow."""
        cfg = resolving_view(server_args)
        widths = (cfg.speculative_num_draft_tokens, cfg.speculative_dflash_block_size)
        return max(widths) if all(widths) else cfg.speculative_num_draft_tokens

    def handle_server_args(self, server_args: Any) -> None:
        config.resolve(server_args)
        # A compiler error here stops the launcher, before a large target is loaded.
        ops.load()


def _create_worker(_: Any) -> type:
    # Imported in the scheduler's process only: the module imports CUDA kernels.
    from kdtree_sglang.worker import DDTreeWorker

    return DDTreeWorker


def register() -> None:
    """Make the name known to `--speculative-algorithm`."""
    SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=config.validate,
        spec_class=DDTreeAlgorithm,
    )(_create_worker)
