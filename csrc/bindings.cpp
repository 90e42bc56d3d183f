// Registers the ops. Outputs are arguments that the op overwrites, so that a CUDA graph can own
// them; kdtree_sglang/ops allocates them for callers who do not.
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY(kdtree, m) {
  m.def(
      "draft_topk_out(Tensor logits, int k, int vocab_start, Tensor(a!) ids, Tensor(b!) values, "
      "Tensor(c!) lse) -> ()");
  m.def(
      "merge_topk_out(Tensor ids, Tensor values, Tensor lse, int k_out, Tensor(a!) out_ids, "
      "Tensor(b!) out_values, Tensor(c!) out_lse) -> ()");
  m.def(
      "build_tree_out(Tensor ids, Tensor log_probs, Tensor root, Tensor prefix_lens, int budget, "
      "Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!) log_mass, "
      "Tensor(e!) positions, Tensor(f!) ancestors, Tensor(g!) next_token, "
      "Tensor(h!) next_sibling, Tensor(i!) num_nodes) -> ()");
  m.def(
      "accept_tree_out(Tensor tokens, Tensor next_token, Tensor next_sibling, Tensor num_nodes, "
      "Tensor predictions, Tensor prefix_lens, int max_depth, Tensor(a!) path, "
      "Tensor(b!) accept_len, Tensor(c!) bonus, Tensor(d!) out_tokens, "
      "Tensor(e!) new_seq_lens) -> ()");
  m.def(
      "compact_kv(Tensor buffer_ptrs, Tensor row_bytes, Tensor slots, Tensor path, "
      "Tensor accept_len) -> ()");
  m.def(
      "gather_path_out(Tensor rows, Tensor path, int num_nodes_per_request, Tensor(a!) out) -> ()");
  m.def(
      "tree_mask(Tensor ancestors, Tensor prefix_lens, Tensor(a!) mask, Tensor mask_indptr, "
      "bool write_prefix) -> ()");
  m.def(
      "tree_attention_out(Tensor q, Tensor k_tail, Tensor ancestors, Tensor prefix_out, "
      "Tensor prefix_lse, float scale, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(kdtree, CPU, m) {
  m.impl("draft_topk_out", &kdtree::DraftTopkCpu);
  m.impl("merge_topk_out", &kdtree::MergeTopkCpu);
  m.impl("build_tree_out", &kdtree::BuildTreeCpu);
  m.impl("accept_tree_out", &kdtree::AcceptTreeCpu);
  m.impl("compact_kv", &kdtree::CompactKvCpu);
  m.impl("gather_path_out", &kdtree::GatherPathCpu);
  m.impl("tree_mask", &kdtree::TreeMaskCpu);
  m.impl("tree_attention_out", &kdtree::TreeAttentionCpu);
}

#ifdef KDTREE_WITH_CUDA
TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("draft_topk_out", &kdtree::DraftTopkCuda);
  m.impl("merge_topk_out", &kdtree::MergeTopkCuda);
  m.impl("build_tree_out", &kdtree::BuildTreeCuda);
  m.impl("accept_tree_out", &kdtree::AcceptTreeCuda);
  m.impl("compact_kv", &kdtree::CompactKvCuda);
  m.impl("gather_path_out", &kdtree::GatherPathCuda);
  m.impl("tree_mask", &kdtree::TreeMaskCuda);
  m.impl("tree_attention_out", &kdtree::TreeAttentionCuda);
}
#endif
