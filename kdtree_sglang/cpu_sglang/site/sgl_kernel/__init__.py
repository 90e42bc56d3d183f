"""Pure-torch stand-ins for the `sgl_kernel` symbols that SGLang 0.5.23 imports on a CPU.

Names, argument order and in-place results are the interface that SGLang calls; sizes are those of
tests, so clarity comes before speed. What SGLang guards with its AMX check is absent on purpose:
without `torch.ops.sgl_kernel.convert_weight_packed` it takes its own torch implementations.
"""

import ctypes

import torch


def _window(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed (request, offset inside the request) pairs for per-request lengths."""
    lengths = lengths.to(torch.int64)
    rows = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    return rows, torch.arange(rows.numel()) - starts[rows]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes packed slots into columns start..end of each request's row."""
    rows, offsets = _window(end_offset - start_offset)
    columns = start_offset.to(torch.int64)[rows] + offsets
    slots = out_cache_loc[: rows.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices.to(torch.int64)[rows], columns] = slots


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Reads columns start..end of each request's row into packed slots."""
    rows, offsets = _window(end_offset - start_offset)
    columns = start_offset.to(torch.int64)[rows] + offsets
    slots = req_to_token[req_pool_indices.to(torch.int64)[rows], columns]
    out_cache_loc[: rows.numel()] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Reads the topk * num_steps slots after each request's committed length."""
    assign_extend_cache_locs_cpu(
        req_pool_indices,
        req_to_token,
        seq_lens,
        seq_lens + topk * num_steps,
        out_cache_loc,
        pool_len,
    )


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """bonus[b] = the last committed token of request b (accept_lens counts the bonus)."""
    requests = torch.arange(accept_lens.numel())
    last = requests * accept_stride + accept_lens.to(torch.int64) - 1
    bonus_tokens[: requests.numel()] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
) -> None:
    """Packs the slots of the accepted entries (index >= 0) in order."""
    flat = accept_index.reshape(-1)
    accepted = flat[flat >= 0].to(torch.int64)
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Moves row src_loc[i] to tgt_loc[i] in every buffer; source and target rows may overlap."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # All reads before the first write: a target may be a later source.
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shifts each request's ids left by one and stores its next token last or at select_index."""
    next_tokens = topk_index.reshape(-1)
    for request, length in enumerate(extend_seq_lens.tolist()):
        if length == 0:
            continue
        start = int(extend_start_loc[request])
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[request])
        input_ids[last] = next_tokens[request]


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,  # SGLang's spelling
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follows the target's argmax through each request's tree, as the CUDA kernel does."""
    flat_predict = target_predict.reshape(-1)
    for request in range(candidates.shape[0]):
        node, accepted = 0, 0
        row = int(retrive_index[request, 0])
        accept_index[request, 0] = row
        while accepted + 1 < accept_index.shape[1]:
            token = int(flat_predict[row])
            node = int(retrive_next_token[request, node])
            while node >= 0 and int(candidates[request, node]) != token:
                node = int(retrive_next_sibling[request, node])
            if node < 0:
                break
            predicts[row] = token
            row = int(retrive_index[request, node])
            accepted += 1
            accept_index[request, accepted] = row
        accept_token_num[request] = accepted
        predicts[row] = flat_predict[row]


def build_tree_kernel_efficient_cpu(*args: object, **kwargs: object) -> None:
    """EAGLE's tree builder, which no test here needs: refused rather than approximated."""
    raise NotImplementedError("EAGLE tree building is not part of the CPU stand-ins")
