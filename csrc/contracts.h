// Argument checks of the ops, shared by the CPU and the CUDA launchers. Every message names the
// argument, what the contract asks for and what came.
#pragma once

#include <ATen/core/Tensor.h>

#include <variant>

#include "kdtree/accept_tree.h"
#include "kdtree/compact_kv.h"
#include "kdtree/tree.h"
#include "kdtree/tree_attention.h"
#include "kdtree/tree_mask.h"

namespace kdtree {

struct TopkSizes {
  int64_t rows;
  int64_t vocab;
  int64_t stride;
};
TopkSizes CheckDraftTopk(const at::Tensor& logits, int64_t k, int64_t vocab_start,
                         const at::Tensor& ids, const at::Tensor& values, const at::Tensor& lse);

// Calls visit with the typed data pointer of logits that CheckDraftTopk accepted.
template <typename Visit>
void VisitLogits(const at::Tensor& logits, const Visit& visit) {
  if (logits.scalar_type() == at::kFloat) {
    visit(logits.const_data_ptr<float>());
  } else if (logits.scalar_type() == at::kBFloat16) {
    visit(logits.const_data_ptr<at::BFloat16>());
  } else {
    visit(logits.const_data_ptr<at::Half>());
  }
}

struct MergeSizes {
  int64_t shards;
  int64_t rows;
  int64_t k;
};
MergeSizes CheckMergeTopk(const at::Tensor& ids, const at::Tensor& values, const at::Tensor& lse,
                          int64_t k_out, const at::Tensor& out_ids, const at::Tensor& out_values,
                          const at::Tensor& out_lse);

struct BuildSizes {
  int64_t requests;
  int depths;
  int candidates;
  int budget;
  TreeView trees;
};
BuildSizes CheckBuildTree(const at::Tensor& ids, const at::Tensor& log_probs,
                          const at::Tensor& root, const at::Tensor& prefix_lens, int64_t budget,
                          const at::Tensor& tokens, const at::Tensor& parents,
                          const at::Tensor& depths, const at::Tensor& log_mass,
                          const at::Tensor& positions, const at::Tensor& ancestors,
                          const at::Tensor& next_token, const at::Tensor& next_sibling,
                          const at::Tensor& num_nodes);

struct AcceptSizes {
  int64_t requests;
  AcceptView view;
};
AcceptSizes CheckAcceptTree(const at::Tensor& tokens, const at::Tensor& next_token,
                            const at::Tensor& next_sibling, const at::Tensor& num_nodes,
                            const at::Tensor& predictions, const at::Tensor& prefix_lens,
                            int64_t max_depth, const at::Tensor& path,
                            const at::Tensor& accept_len, const at::Tensor& bonus,
                            const at::Tensor& out_tokens, const at::Tensor& new_seq_lens);

struct CompactSizes {
  int64_t buffers;
  int64_t requests;
  CompactView view;
};
CompactSizes CheckCompactKv(const at::Tensor& buffer_ptrs, const at::Tensor& row_bytes,
                            const at::Tensor& slots, const at::Tensor& path,
                            const at::Tensor& accept_len);

struct GatherSizes {
  int64_t requests;
  int64_t nodes;
  int64_t steps;
  int64_t row_bytes;
};
GatherSizes CheckGatherPath(const at::Tensor& rows, const at::Tensor& path, int64_t nodes,
                            const at::Tensor& out);

struct MaskSizes {
  int64_t requests;
  MaskView view;
};
MaskSizes CheckTreeMask(const at::Tensor& ancestors, const at::Tensor& prefix_lens,
                        const at::Tensor& mask, const at::Tensor& mask_indptr, bool write_prefix);

struct AttentionSizes {
  int64_t requests;
  std::variant<AttentionView<float>, AttentionView<BFloat16>> view;
};
AttentionSizes CheckTreeAttention(const at::Tensor& q, const at::Tensor& k_tail,
                                  const at::Tensor& ancestors, const at::Tensor& prefix_out,
                                  const at::Tensor& prefix_lse, double scale,
                                  const at::Tensor& out);

}  // namespace kdtree
