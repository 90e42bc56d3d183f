"""The options of DDTREE-NATIVE, their checks and their defaults, in one place.

| option | flag | default |
|---|---|---|
| budget: nodes besides the root | --speculative-num-draft-tokens minus 1 | 2 x block size |
| block size: drafts and anchor | --speculative-dflash-block-size | the checkpoint's |
| candidates: tokens at each depth | --speculative-eagle-topk | the budget: an exact tree |

Every refusal names the flag and the fix. SGLang calls `validate` and then `resolve` while it
resolves its arguments (seam: srt/arg_groups/speculative_hook.py, handle_speculative_decoding).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from kdtree_sglang.plugin import ALGORITHM

MAX_BUDGET = 127
MAX_CANDIDATES = 127
MAX_BLOCK_SIZE = 16

# Backends that verify a tree under its mask, the default first. Two depend on more than the name,
# which is checked where they are created: flashinfer serves GQA targets only, and torch_native is
# causal outside kdtree_sglang.cpu_sglang.
TREE_BACKENDS = {"cuda": ("triton", "flashinfer"), "cpu": ("torch_native",)}

# --speculative-eagle-topk > 1 would resize SGLang's KV allocation (allocation_sizing.py), so the
# value moves here, where the scheduler processes inherit it, and the flag is set to 1.
CANDIDATES_VARIABLE = "DDTREE_CANDIDATES"

# For tests: one candidate a depth, so that the tree is DFLASH's chain.
FORCE_CHAIN_VARIABLE = "DDTREE_FORCE_CHAIN"

# (field of ServerArgs, value that is served, flag and fix)
_UNSUPPORTED_FEATURES = (
    ("pp_size", 1, "--pp-size {value}", "--pp-size 1"),
    ("tp_size", 1, "--tp-size {value}", "--tp-size 1"),
    ("attn_cp_size", 1, "--attn-cp-size {value}", "--attn-cp-size 1"),
    ("dcp_size", 1, "--dcp-size {value}", "--dcp-size 1"),
    ("disaggregation_mode", "null", "--disaggregation-mode {value}", "leave it out"),
    ("enable_hierarchical_cache", False, "--enable-hierarchical-cache", "leave it out"),
    ("enable_hisparse", False, "--enable-hisparse", "leave it out"),
    ("enable_unified_memory", False, "--enable-unified-memory", "leave it out"),
    ("enable_two_batch_overlap", False, "--enable-two-batch-overlap", "leave it out"),
    ("enable_pdmux", False, "--enable-pdmux", "leave it out"),
    ("enable_mixed_chunk", False, "--enable-mixed-chunk", "leave it out"),
    ("speculative_adaptive", False, "--speculative-adaptive", "leave it out"),
    ("enable_strict_thinking", False, "--enable-strict-thinking", "leave it out"),
    ("enable_watermark", False, "--enable-watermark", "leave it out"),
    ("kv_canary", "none", "--kv-canary {value}", "leave it out"),
    ("use_ray", False, "--use-ray", "leave it out"),
    ("speculative_draft_window_size", None, "--speculative-draft-window-size", "leave it out"),
)


class Refusal(ValueError):
    """A combination that this release does not serve; the message names the flag and the fix."""

    def __init__(self, flag: str, why: str, fix: str):
        super().__init__(f"{ALGORITHM}: {flag}: {why} Fix: {fix}.")


@dataclass(frozen=True)
class DDTreeConfig:
    """What one server runs with.

    Attributes:
        budget: draft nodes besides the root, 1..127.
        block_size: B, 2..16; the drafter predicts B - 1 depths.
        candidates: K, 1..127 tokens a depth.
    """

    budget: int
    block_size: int
    candidates: int

    @property
    def verify_width(self) -> int:
        """N: queries a request in the target's verify, the root counted."""
        return self.budget + 1

    @property
    def window(self) -> int:
        """KV slots that one step may write: the verify's N or the draft block's B."""
        return max(self.verify_width, self.block_size)

    @property
    def max_depth(self) -> int:
        """L: draft tokens that one step can accept at most."""
        return self.block_size - 1


def validate(args: Any) -> None:
    """Refuse what would not serve the target's text. Reads `args`, writes nothing."""
    _check_platform(args)
    _check_models(args)
    _check_sizes(args)
    _check_attention(args)


def resolve(args: Any) -> None:
    """Fill in the defaults; assignments on `args` only. Idempotent."""
    block_size = _block_size(args)
    width = args.speculative_num_draft_tokens or 2 * block_size + 1
    _publish_candidates(args, budget=width - 1)
    args.speculative_num_draft_tokens = int(width)
    args.speculative_dflash_block_size = int(block_size)
    args.speculative_eagle_topk = 1
    args.speculative_num_steps = 1
    args.speculative_draft_attention_backend = _draft_backend(args)
    if args.max_running_requests is None:
        # Stock DFLASH's default, whose memory sizing we share.
        args.max_running_requests = 48


def current() -> DDTreeConfig:
    """The configuration of the running server, in any of its processes."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    budget = int(spec.speculative_num_draft_tokens) - 1
    candidates = int(os.environ.get(CANDIDATES_VARIABLE, budget))
    if os.environ.get(FORCE_CHAIN_VARIABLE) == "1":
        candidates = 1
    return DDTreeConfig(
        budget=budget,
        block_size=int(spec.speculative_dflash_block_size),
        candidates=candidates,
    )


def unsupported_request(req: Any) -> str | None:
    """Why a request cannot be served yet, or None. SGLang answers it with HTTP 400."""
    if req.return_hidden_states:
        return _request_refusal("return_hidden_states", "leave it out")
    # SGLang would read these outputs by chain position, where a tree's rows are nodes.
    for field in ("return_sampling_mask", "return_routed_experts", "return_indexer_topk"):
        if getattr(req, field):
            return _request_refusal(field, "leave it out")
    return None


def _request_refusal(what: str, fix: str) -> str:
    return (
        f"{ALGORITHM} does not support {what} yet. "
        f"Fix: {fix}, or serve with --speculative-algorithm DFLASH."
    )


def _check_platform(args: Any) -> None:
    if args.device not in TREE_BACKENDS:
        raise Refusal(f"--device {args.device}", "only CUDA is served.", "--device cuda")
    for field, served, flag, fix in _UNSUPPORTED_FEATURES:
        value = getattr(args, field)
        if value != served:
            raise Refusal(flag.format(value=value), "not supported with draft trees yet.", fix)
    if args.enable_lora or args.lora_paths:
        raise Refusal("--enable-lora", "not supported with draft trees yet.", "leave it out")
    if args.enable_dp_attention or args.dp_size > 1:
        raise Refusal("--dp-size / --enable-dp-attention", "not supported yet.", "leave them out")
    if args.speculative_draft_model_path is None:
        raise Refusal(
            "--speculative-draft-model-path is missing",
            "trees are drafted by a DFlash checkpoint.",
            "--speculative-draft-model-path DRAFT",
        )


def _check_sizes(args: Any) -> None:
    block_size = _block_size(args)
    if not 2 <= block_size <= MAX_BLOCK_SIZE:
        raise Refusal(
            f"--speculative-dflash-block-size {block_size}",
            f"the block holds the anchor and 1..{MAX_BLOCK_SIZE - 1} drafts.",
            f"a block size of 2..{MAX_BLOCK_SIZE}",
        )
    width = args.speculative_num_draft_tokens
    if width is not None and not 1 <= width - 1 <= MAX_BUDGET:
        raise Refusal(
            f"--speculative-num-draft-tokens {width}",
            f"it counts the root, so the budget would be {width - 1}; 1..{MAX_BUDGET} are served.",
            f"--speculative-num-draft-tokens 2..{MAX_BUDGET + 1}",
        )
    candidates = args.speculative_eagle_topk
    if candidates is not None and not 1 <= candidates <= MAX_CANDIDATES:
        raise Refusal(
            f"--speculative-eagle-topk {candidates}",
            f"1..{MAX_CANDIDATES} candidates a depth are served.",
            "leave it out (the budget is the exact tree's number)",
        )


def _check_attention(args: Any) -> None:
    from sglang.srt.arg_groups.overrides import attention_backends_of

    served = TREE_BACKENDS[args.device]
    prefill, decode = attention_backends_of(args)
    prefill_verifies = args.speculative_attention_mode == "prefill"
    backend = prefill if prefill_verifies else decode
    if backend not in served:
        flag = "--attention-backend"
        if prefill != decode:
            # The split flags win over --attention-backend, so the fix must name the same half.
            flag = f"--{'prefill' if prefill_verifies else 'decode'}-attention-backend"
        raise Refusal(
            f"{flag} {backend}",
            "the target's verify runs on it, and it would put a causal mask over the tree.",
            f"{flag} {' or '.join(served)}",
        )
    draft = _draft_backend(args)
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

    # trtllm_mha takes the verify width for the draft's own (seam: trtllm_mha_backend.py).
    if draft not in DRAFT_ATTENTION_BACKEND_CHOICES or draft == "trtllm_mha":
        raise Refusal(
            f"--speculative-draft-attention-backend {draft}",
            "it cannot run the draft block.",
            f"--speculative-draft-attention-backend {served[0]}",
        )


def _check_models(args: Any) -> None:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    target = _hf_config(args, args.model_path, args.revision)
    draft = _draft_hf_config(args)
    flag = f"--speculative-draft-model-path {args.speculative_draft_model_path}"
    architectures = list(getattr(draft, "architectures", None) or ())
    if architectures != ["DFlashDraftModel"]:
        why = f"its architecture is {architectures}."
        raise Refusal(flag, why, "a DFlashDraftModel checkpoint")
    parsed = parse_dflash_draft_config(draft_hf_config=draft)
    if parsed.is_domino or parsed.selector_rank:
        raise Refusal(
            flag,
            "its candidate head proposes a chain of its own.",
            "a plain DFlash checkpoint, or --speculative-algorithm DFLASH",
        )
    target_text, draft_text = target.get_text_config(), draft.get_text_config()
    for field, name in (("vocab_size", "vocabulary"), ("hidden_size", "hidden size")):
        wanted, found = getattr(target_text, field), getattr(draft_text, field, None)
        if wanted != found:
            raise Refusal(
                flag,
                f"its {name} is {found}, the target's is {wanted}.",
                "the draft that was trained for this target",
            )
    if _is_hybrid(target):
        raise Refusal(
            f"--model-path {args.model_path}",
            "hybrid (Mamba, linear-attention) targets commit their state along a chain.",
            "--speculative-algorithm DFLASH",
        )


def _is_hybrid(target: Any) -> bool:
    """Whether the target keeps a recurrent state (seam: srt/configs/hybrid_arch.py)."""
    from types import SimpleNamespace

    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config

    # The fields of SGLang's ModelConfig that the question depends on.
    model = SimpleNamespace(
        hf_config=target,
        hf_text_config=target.get_text_config(),
        is_draft_model=False,
        linear_attn_registry_result=get_linear_attn_config(target),
    )
    return mambaish_config(model) is not None


def _draft_backend(args: Any) -> str:
    """The draft's attention: the user's, else the default that serves every target."""
    return args.speculative_draft_attention_backend or TREE_BACKENDS[args.device][0]


def _block_size(args: Any) -> int:
    """The flag, else the draft checkpoint's `block_size`."""
    if args.speculative_dflash_block_size is not None:
        return int(args.speculative_dflash_block_size)
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    parsed = parse_dflash_draft_config(draft_hf_config=_draft_hf_config(args))
    block_size = parsed.resolve_block_size(default=None)
    if block_size is None:
        raise Refusal(
            f"--speculative-draft-model-path {args.speculative_draft_model_path}",
            "its config.json names no block_size.",
            "--speculative-dflash-block-size B",
        )
    return int(block_size)


def _publish_candidates(args: Any, budget: int) -> None:
    """Move the candidates from the flag to the environment of the processes to come.

    A second resolution finds the 1 that the first one wrote; the user's value then stands in the
    raw input that SGLang keeps.
    """
    raw = getattr(args, "_raw_input", None) or {}
    asked = raw.get("speculative_eagle_topk", args.speculative_eagle_topk)
    os.environ[CANDIDATES_VARIABLE] = str(budget if asked is None else int(asked))


def _draft_hf_config(args: Any) -> Any:
    revision = args.speculative_draft_model_revision
    return _hf_config(args, args.speculative_draft_model_path, revision)


def _hf_config(args: Any, path: str, revision: str | None) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(
        path,
        trust_remote_code=args.trust_remote_code,
        revision=revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
