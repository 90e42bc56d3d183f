"""DDTreeWorker: one decode step of DDTREE-NATIVE on SGLang's DFLASH worker.

    draft    a DFlash forward over B positions, then candidates and a best-first tree
    verify   one target forward over the tree's N nodes under its mask
    accept   the target's own token after each node, greedy or drawn, and the walk along them
    commit   accepted KV to the front, accepted hidden states into the draft's KV

Prefill, draft model, KV pools and graphs are the stock worker's (seam:
srt/speculative/dflash_worker_v2.py). The draft width B and the verify width N are independent; the
step's KV window holds max(B, N) slots, of which the draft block writes the first B and the verify
the first N. Everything stays on the device and in stream order, so SGLang's overlap schedule runs
the next step's host work under this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.model_executor.model_runner import SamplingPrewarmResult
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from sglang.srt.speculative.dflash_worker_v2 import (
    DFlashWorkerV2,
    _resolve_dflash_embedding_module,
)
from sglang.srt.speculative.draft_worker_common import (
    build_block_pos_offsets,
    make_draft_block_spec_info,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    GrammarTree,
    build_grammar_vocab_mask,
    draft_tp_context,
)

from kdtree_sglang import config, hooks, ops
from kdtree_sglang.attention.masked import tree_backend, write_tree_mask
from kdtree_sglang.penalties import PathPenalties
from kdtree_sglang.predict import adjust_logits, predict
from kdtree_sglang.verify_input import tree_verify_input


@dataclass
class Step:
    """What the parts of one decode step share.

    Attributes:
        bs: requests in the batch.
        prefix_lens: `[bs]` i64, committed tokens; the root is the token at this position.
        root: `[bs]` i64, last committed token, not yet in the KV cache.
        plan: KV locations of the window, `[bs, max(B, N)]` slots.
        host_lens: host upper bound of `prefix_lens`, `[bs]`: their mirror where SGLang keeps one,
            else the lengths that are reserved, which include this step's window.
        mirrored: which of the two.
    """

    bs: int
    prefix_lens: torch.Tensor
    root: torch.Tensor
    plan: KVLocPlan
    host_lens: torch.Tensor
    mirrored: bool

    def host_kv_lens(self, width: int) -> torch.Tensor:
        """`[bs]` KV lengths for a backend to plan `width` queries a request on."""
        return self.host_lens + width if self.mirrored else self.host_lens


class DDTreeWorker(DFlashWorkerV2):
    """Args are the stock worker's; see srt/managers/scheduler.py, init_model_worker."""

    def __init__(self, *args: Any, **kwargs: Any):
        hooks.assert_applied()
        if SIMULATE_ACC_LEN > 0:
            raise config.Refusal(
                "SGLANG_SIMULATE_ACC_LEN", "not simulated for trees yet.", "unset it"
            )
        ops.load()
        super().__init__(*args, **kwargs)
        self.config = config.current()
        self._head = self._dense_head()
        # The stock constructor took the verify width for the draft block.
        self.block_size = self.config.block_size
        self.draft_model.set_block_size(self.block_size)
        self._block_pos_offsets = build_block_pos_offsets(
            length=self.block_size, device=self.device
        )
        self._draft_block_spec_info = make_draft_block_spec_info(
            draft_token_num=self.block_size, device=self.device
        )
        self._window_offsets = build_block_pos_offsets(
            length=self.config.window, device=self.device
        )

    def _dense_head(self) -> torch.Tensor:
        """The target's head as `[V, H]`, which scores the draft's hidden states."""
        heads = {"selector": self.selector, "lilicorr": self.lilicorr, "Domino": self._is_domino}
        for head, present in heads.items():
            if present:
                raise config.Refusal(
                    "--speculative-draft-model-path",
                    f"its {head} head proposes a chain of its own.",
                    "a plain DFlash checkpoint, or --speculative-algorithm DFLASH",
                )
        lm_head = unwrap_lora_layer(self.target_worker.model_runner.model.lm_head)
        weight = getattr(lm_head, "weight", None)
        if not is_dense_head_weight(weight):
            raise config.Refusal(
                "--model-path", "its lm_head is quantised.", "a checkpoint with a dense lm_head"
            )
        shard = getattr(lm_head, "shard_indices", None)
        if shard is not None and shard.num_added_elements:
            raise config.Refusal("--model-path", "it has added vocabulary.", "a merged vocabulary")
        # The rows beyond are padding, whose ids no tokenizer knows.
        return weight if shard is None else weight[: shard.num_org_elements]

    def _defer_target_verify_gather(self) -> None:
        # Stock would leave verify logits sharded for its own greedy path.
        return None

    def prewarm_sampling(self) -> SamplingPrewarmResult:
        """Rehearse the draws of the largest batch, so that their memory is known at start-up.

        Returns what SGLang sizes a GPU's pools by: the bytes of the logits and those beyond.
        """
        runner, width = self.model_runner, self.config.verify_width
        result = runner.prewarm_sampling()
        bs = min(runner.max_decode_logits_rows() // width, int(runner.max_running_requests))
        bs, vocabulary = max(1, bs), self.model_config.vocab_size
        info = SamplingBatchInfo(
            temperatures=torch.ones((bs, 1), device=self.device),
            top_ps=torch.full((bs,), 0.95, device=self.device),
            top_ks=torch.full((bs,), TOP_K_ALL, dtype=torch.int32, device=self.device),
            min_ps=torch.zeros(bs, device=self.device),
            is_all_greedy=False,
            is_any_greedy=True,
            need_top_p_sampling=True,
            need_top_k_sampling=False,
            need_min_p_sampling=False,
            vocab_size=vocabulary,
        )
        positions = torch.zeros((bs, width), dtype=torch.int64, device=self.device)
        logits = torch.zeros((bs * width, vocabulary), device=self.device)
        on_gpu = logits.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        predict(runner.sampler, logits, info, positions)
        if on_gpu:
            torch.cuda.synchronize()
            beyond = torch.cuda.max_memory_allocated() - before
            sampling_input_bytes = logits.numel() * logits.element_size()
            result = SamplingPrewarmResult(
                sampling_input_bytes=sampling_input_bytes,
                sampling_headroom_bytes=beyond + sampling_input_bytes,
            )
            runner.sampling_prewarm_result = result
        return result

    # -- set-up, in the order in which the scheduler calls it ---------------------------------

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        tree_backend(self.model_runner.attn_backend)
        if (self.model_runner.sliding_window_size or 0) > 0:
            # The kernels place a query by its row in the window, which in a tree is not its depth.
            raise config.Refusal(
                "--model-path",
                "sliding-window layers would take a node's number for its position.",
                "--speculative-algorithm DFLASH",
            )
        self._kv_ptrs, self._kv_row_bytes = self._kv_buffers()

    def init_cuda_graphs(self) -> None:
        # Graphs write the tree into these, so they are allocated once, for the largest batch.
        max_bs = self.model_runner.req_to_token_pool.size
        self._tree = ops.empty_tree(max_bs, self.config.budget, self.device)
        rows = self.model_runner.req_to_token_pool.req_to_token.shape[0]
        self._penalties = PathPenalties(rows, self.model_config.vocab_size, self.device)
        self.draft_model_runner.capture_tail_hooks.append(self._capture_tree)
        super().init_cuda_graphs()

    def _maybe_build_draft_sampler(self) -> None:
        # The tail hook takes the place of the stock chain's sampler.
        return None

    def _kv_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Addresses and row sizes of the target's KV buffers, for compaction."""
        pool = self.model_runner.token_to_kv_pool
        if type(pool) is MLATokenToKVPool:
            buffers = list(pool.kv_buffer)
        elif (
            type(pool) is MHATokenToKVPool
            and not pool.is_quantized_kv_cache  # block scales would stay behind
            and pool.kv_cache_layout == "nhd"
        ):
            buffers = [*pool.k_buffer, *pool.v_buffer]
        else:
            raise config.Refusal(
                "--model-path / --kv-cache-dtype",
                f"accepted rows cannot be moved inside a {type(pool).__name__}.",
                "a full-attention target with auto or fp8 KV",
            )
        ptrs = [buffer.data_ptr() for buffer in buffers]
        row_bytes = [buffer.stride(0) * buffer.element_size() for buffer in buffers]
        return (
            torch.tensor(ptrs, dtype=torch.int64, device=self.device),
            torch.tensor(row_bytes, dtype=torch.int64, device=self.device),
        )

    # -- the step -----------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Prefill and idle batches run the stock path, decode batches one tree step."""
        if (
            batch.forward_mode.is_extend()
            or batch.is_extend_in_batch
            or batch.forward_mode.is_idle()
        ):
            return self._prefill(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        draft_input = batch.spec_info
        if not isinstance(draft_input, DFlashDraftInputV2):
            found = type(draft_input).__name__
            raise RuntimeError(f"decode batch carries {found}, not DFLASH state")

        step = self._begin(batch, draft_input)
        tree = self._draft_tree(batch, step)
        # Before the verify is launched: it only enqueues copies to the host.
        links = (tree.next_token, tree.next_sibling, tree.tokens)
        grammar_tree = GrammarTree.from_device(*links) if batch.has_grammar else None
        target_out = self._verify(batch, step, tree)
        grammar_mask = self._grammar_mask(batch, grammar_tree, grammar_barrier)
        accepted = self._accept(batch, step, tree, target_out.logits_output, grammar_mask)
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        commit_lens = accepted.accept_len + 1
        self._penalties.commit(
            batch.reqs, batch.req_pool_indices, accepted.out_tokens, commit_lens
        )
        self._commit(step, accepted, commit_lens, target_out.logits_output)

        return GenerationBatchResult(
            logits_output=target_out.logits_output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=commit_lens,
            can_run_cuda_graph=target_out.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=accepted.new_seq_lens
            ),
            # The stride of next_token_ids, not the verify width.
            speculative_num_draft_tokens=self.block_size,
            new_seq_lens=accepted.new_seq_lens,
            routed_experts_output=target_out.routed_experts_output,
            indexer_topk_output=target_out.indexer_topk_output,
        )

    def _prefill(self, batch: ScheduleBatch, *stock_args: Any) -> GenerationBatchResult:
        """The stock worker's, with our count of what is penalised."""
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, *stock_args)
        scheduler_info = batch.sampling_info
        batch.sampling_info = self._penalties.resume(scheduler_info, batch.reqs)
        try:
            result = super().forward_batch_generation(batch, *stock_args)
        finally:
            batch.sampling_info = scheduler_info
        self._penalties.begin(batch.reqs, batch.req_pool_indices, result.next_token_ids)
        return result

    def _begin(self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2) -> Step:
        """Read the window's slots, once: later the row may belong to another request."""
        prefix_lens = batch.seq_lens
        # Overlap relays it from the previous step, perhaps from another stream.
        prefix_lens.record_stream(torch.get_device_module(self.device).current_stream())
        mirrored = batch.seq_lens_cpu is not None
        host_lens = batch.seq_lens_cpu if mirrored else draft_input.nxt_kv_lens_cpu
        columns = prefix_lens.unsqueeze(1) + self._window_offsets
        req_to_token = self.model_runner.req_to_token_pool.req_to_token
        window = req_to_token[batch.req_pool_indices.unsqueeze(1), columns].to(torch.int64)
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_lens,
            seq_lens_cpu=host_lens,
            write_virtual=window.reshape(-1),
            read_extent=self.config.window,
        )
        return Step(
            bs=len(prefix_lens),
            prefix_lens=prefix_lens,
            root=draft_input.bonus_tokens,
            plan=plan,
            host_lens=host_lens,
            mirrored=mirrored,
        )

    # -- draft --------------------------------------------------------------------------------

    def _draft_tree(self, batch: ScheduleBatch, step: Step) -> ops.Tree:
        """One draft forward; the tree is built in its graph's tail, or here without a graph."""
        forward_batch = self._draft_batch(batch, step)
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            draft_out = self.draft_model_runner.forward(forward_batch)
        tree = ops.Tree(*(field[: step.bs] for field in self._tree))
        if not draft_out.can_run_graph:
            self._build_tree(
                draft_out.logits_output.hidden_states, step.root, step.prefix_lens, tree
            )
        return tree

    def _draft_batch(self, batch: ScheduleBatch, step: Step) -> ForwardBatch:
        """The block `[root, mask, mask, ...]` of every request, embedded by the target."""
        bs, block_size = step.bs, self.block_size
        block_ids = torch.full(
            (bs, block_size), self._mask_token_id, dtype=torch.int64, device=self.device
        )
        block_ids[:, 0] = step.root
        positions = step.prefix_lens.unsqueeze(1) + self._block_pos_offsets
        seq_lens_cpu = step.host_kv_lens(block_size).to(torch.int32)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block_ids.reshape(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=step.prefix_lens,
            out_cache_loc=None,  # bound to the plan below
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            positions=positions.reshape(-1),
            input_embeds=self._embed(block_ids),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), bs * block_size, dtype=torch.int32, device=self.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=bs * block_size,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        step.plan.bind(
            forward_batch, self.draft_model_runner.kv_index_translator, cols=slice(0, block_size)
        )
        return forward_batch

    def _embed(self, block_ids: torch.Tensor) -> torch.Tensor:
        """`[bs, B]` ids to `[bs*B, H]` embeddings of the target, scaled as its drafts expect."""
        target = self.target_worker.model_runner.model
        module = _resolve_dflash_embedding_module(self.draft_model, target)
        embeds = unwrap_lora_layer(module)(block_ids)
        embeds = embeds.reshape(-1, embeds.shape[-1])
        return embeds if self._noise_embed_scale == 1.0 else embeds * self._noise_embed_scale

    def _capture_tree(
        self, runner: Any, out: LogitsProcessorOutput, forward_batch: ForwardBatch, num_tokens: int
    ) -> None:
        """Tail of the draft graph (seam: ModelRunner.capture_tail_hooks); re-run in warm-ups."""
        bs = num_tokens // self.block_size
        block = (bs, self.block_size)
        self._build_tree(
            out.hidden_states,
            forward_batch.input_ids[:num_tokens].view(block)[:, 0].contiguous(),
            forward_batch.positions[:num_tokens].view(block)[:, 0].contiguous(),
            ops.Tree(*(field[:bs] for field in self._tree)),
        )

    def _build_tree(
        self,
        hidden: torch.Tensor,
        root: torch.Tensor,
        prefix_lens: torch.Tensor,
        out: ops.Tree,
    ) -> None:
        """Candidates of each depth and the best-first tree over them.

        Args:
            hidden: `[bs*B, H]` of the draft forward; row j of a block predicts depth j.
            root, prefix_lens: `[bs]` i64.
            out: overwritten.
        """
        bs, depths = root.shape[0], self.config.max_depth
        rows = hidden.view(bs, self.block_size, -1)[:, 1:].reshape(bs * depths, -1)
        logits = torch.matmul(rows.to(self._head.dtype), self._head.T)
        top = ops.draft_topk(logits, min(self.config.candidates, self._head.shape[0]))
        log_probs = top.values - top.lse.unsqueeze(1)
        ops.build_tree_out(
            top.ids.view(bs, depths, -1),
            log_probs.view(bs, depths, -1),
            root,
            prefix_lens,
            self.config.budget,
            out,
        )

    # -- verify -------------------------------------------------------------------------------

    def _verify(
        self, batch: ScheduleBatch, step: Step, tree: ops.Tree
    ) -> GenerationBatchResult:
        """The target's forward over all nodes; logits `[bs*N, V]`, aux hidden `[bs*N, A*H]`."""
        mask = write_tree_mask(
            tree_backend(self.model_runner.attn_backend),
            tree,
            step.prefix_lens,
            max_prefix_sum=int(step.host_lens.sum()),
        )
        verify_input = tree_verify_input(tree, mask, step.plan)
        batch.out_cache_loc = step.plan.virtual_write_ids(cols=verify_input.kv_loc_cols)
        # Backends plan on the KV lengths they will read; the scheduler gets its own back.
        scheduler_lens = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = step.host_kv_lens(self.config.verify_width)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = scheduler_lens
        return self.target_worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )

    # -- accept and commit --------------------------------------------------------------------

    def _grammar_mask(
        self, batch: ScheduleBatch, tree: GrammarTree | None, barrier: Callable | None
    ) -> GrammarMask | None:
        """What each node's own path leaves its grammar; host work under the running verify."""
        if tree is None:
            return None
        return build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=tree,
            sampling_info=batch.sampling_info,
            device=self.device,
            barrier=barrier,
        )

    def _accept(
        self,
        batch: ScheduleBatch,
        step: Step,
        tree: ops.Tree,
        logits_output: LogitsProcessorOutput,
        grammar_mask: GrammarMask | None,
    ) -> ops.Acceptance:
        """The target's token after each node, then the walk that follows them."""
        info, width = batch.sampling_info, self.config.verify_width
        logits = logits_output.next_token_logits
        self._penalties.apply(logits, batch.reqs, batch.req_pool_indices, tree)
        adjust_logits(logits, info, width, grammar_mask)
        # Drawing destroys the logits that the returned log-probabilities come from.
        keep = batch.return_logprob and not info.is_all_greedy
        scores = logits.clone() if keep else logits
        predictions = predict(self.model_runner.sampler, logits, info, tree.positions)
        self._tp_sync.sync(
            SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
            if info.is_all_greedy
            else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE,
            predictions,
        )
        accepted = ops.accept_tree(
            tree.tokens,
            tree.next_token,
            tree.next_sibling,
            tree.num_nodes,
            predictions,
            step.prefix_lens,
            self.config.max_depth,
        )
        if batch.return_logprob:
            # A chain of B rows a request, as out_tokens lie.
            rows = ops.gather_path(scores, accepted.path, width)
            logits_output.next_token_logits = rows.flatten(0, 1)
            compute_spec_logprobs(
                batch,
                logits_output,
                accepted.out_tokens.reshape(-1),
                chain_stride=accepted.path.shape[1],
            )
        return accepted

    def _commit(
        self,
        step: Step,
        accepted: ops.Acceptance,
        commit_lens: torch.Tensor,
        logits_output: LogitsProcessorOutput,
    ) -> None:
        """Make the accepted path the request's KV, in the target's pool and in the draft's."""
        width = self.config.verify_width
        window = step.plan.write_ids(self.model_runner.kv_index_translator).view(step.bs, -1)
        ops.compact_kv(
            self._kv_ptrs,
            self._kv_row_bytes,
            window[:, :width].contiguous(),
            accepted.path,
            accepted.accept_len,
        )
        hidden = ops.gather_path(logits_output.hidden_states, accepted.path, width)
        draft_window = self._draft_write_ids(step.plan).view(step.bs, -1)
        cache_loc = draft_window[:, : self.block_size].contiguous()
        positions = step.prefix_lens.unsqueeze(1) + self._block_pos_offsets
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.view(-1, hidden.shape[-1]),
            cache_loc=cache_loc.view(-1),
            cache_loc_2d=cache_loc,
            positions=positions.reshape(-1),
            commit_lens=commit_lens,
        )
        # Overlap would copy them to the host.
        logits_output.hidden_states = None
