// The launchers, one an op and device. Outputs come last, allocated by the caller; contracts are in
// the docstrings of kdtree_sglang/ops.
#pragma once

#include <ATen/core/Tensor.h>

namespace kdtree {

void DraftTopkCpu(const at::Tensor& logits, int64_t k, int64_t vocab_start, const at::Tensor& ids,
                  const at::Tensor& values, const at::Tensor& lse);
void MergeTopkCpu(const at::Tensor& ids, const at::Tensor& values, const at::Tensor& lse,
                  int64_t k_out, const at::Tensor& out_ids, const at::Tensor& out_values,
                  const at::Tensor& out_lse);
void BuildTreeCpu(const at::Tensor& ids, const at::Tensor& log_probs, const at::Tensor& root,
                  const at::Tensor& prefix_lens, int64_t budget, const at::Tensor& tokens,
                  const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& log_mass,
                  const at::Tensor& positions, const at::Tensor& ancestors,
                  const at::Tensor& next_token, const at::Tensor& next_sibling,
                  const at::Tensor& num_nodes);
void AcceptTreeCpu(const at::Tensor& tokens, const at::Tensor& next_token,
                   const at::Tensor& next_sibling, const at::Tensor& num_nodes,
                   const at::Tensor& predictions, const at::Tensor& prefix_lens, int64_t max_depth,
                   const at::Tensor& path, const at::Tensor& accept_len, const at::Tensor& bonus,
                   const at::Tensor& out_tokens, const at::Tensor& new_seq_lens);
void CompactKvCpu(const at::Tensor& buffer_ptrs, const at::Tensor& row_bytes,
                  const at::Tensor& slots, const at::Tensor& path, const at::Tensor& accept_len);
void GatherPathCpu(const at::Tensor& rows, const at::Tensor& path, int64_t num_nodes_per_request,
                   const at::Tensor& out);
void TreeMaskCpu(const at::Tensor& ancestors, const at::Tensor& prefix_lens, const at::Tensor& mask,
                 const at::Tensor& mask_indptr, bool write_prefix);
void TreeAttentionCpu(const at::Tensor& q, const at::Tensor& k_tail, const at::Tensor& ancestors,
                      const at::Tensor& prefix_out, const at::Tensor& prefix_lse, double scale,
                      const at::Tensor& out);

void DraftTopkCuda(const at::Tensor& logits, int64_t k, int64_t vocab_start, const at::Tensor& ids,
                   const at::Tensor& values, const at::Tensor& lse);
void MergeTopkCuda(const at::Tensor& ids, const at::Tensor& values, const at::Tensor& lse,
                   int64_t k_out, const at::Tensor& out_ids, const at::Tensor& out_values,
                   const at::Tensor& out_lse);
void BuildTreeCuda(const at::Tensor& ids, const at::Tensor& log_probs, const at::Tensor& root,
                   const at::Tensor& prefix_lens, int64_t budget, const at::Tensor& tokens,
                   const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& log_mass,
                   const at::Tensor& positions, const at::Tensor& ancestors,
                   const at::Tensor& next_token, const at::Tensor& next_sibling,
                   const at::Tensor& num_nodes);
void AcceptTreeCuda(const at::Tensor& tokens, const at::Tensor& next_token,
                    const at::Tensor& next_sibling, const at::Tensor& num_nodes,
                    const at::Tensor& predictions, const at::Tensor& prefix_lens, int64_t max_depth,
                    const at::Tensor& path, const at::Tensor& accept_len, const at::Tensor& bonus,
                    const at::Tensor& out_tokens, const at::Tensor& new_seq_lens);
void CompactKvCuda(const at::Tensor& buffer_ptrs, const at::Tensor& row_bytes,
                   const at::Tensor& slots, const at::Tensor& path, const at::Tensor& accept_len);
void GatherPathCuda(const at::Tensor& rows, const at::Tensor& path, int64_t num_nodes_per_request,
                    const at::Tensor& out);
void TreeMaskCuda(const at::Tensor& ancestors, const at::Tensor& prefix_lens,
                  const at::Tensor& mask, const at::Tensor& mask_indptr, bool write_prefix);
void TreeAttentionCuda(const at::Tensor& q, const at::Tensor& k_tail, const at::Tensor& ancestors,
                       const at::Tensor& prefix_out, const at::Tensor& prefix_lse, double scale,
                       const at::Tensor& out);

}  // namespace kdtree
