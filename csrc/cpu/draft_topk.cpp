#include <ATen/Parallel.h>

#include "contracts.h"
#include "kdtree/draft_topk.h"
#include "ops.h"

namespace kdtree {

void DraftTopkCpu(const at::Tensor& logits, int64_t k, int64_t vocab_start, const at::Tensor& ids,
                  const at::Tensor& values, const at::Tensor& lse) {
  const TopkSizes sizes = CheckDraftTopk(logits, k, vocab_start, ids, values, lse);
  int64_t* ids_at = ids.data_ptr<int64_t>();
  float* values_at = values.data_ptr<float>();
  float* lse_at = lse.data_ptr<float>();
  VisitLogits(logits, [&](const auto* logits_at) {
    at::parallel_for(0, sizes.rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        DraftTopk(logits_at + row * sizes.stride, sizes.vocab, k, vocab_start, ids_at + row * k,
                  values_at + row * k, lse_at + row);
      }
    });
  });
}

void MergeTopkCpu(const at::Tensor& ids, const at::Tensor& values, const at::Tensor& lse,
                  int64_t k_out, const at::Tensor& out_ids, const at::Tensor& out_values,
                  const at::Tensor& out_lse) {
  const MergeSizes sizes = CheckMergeTopk(ids, values, lse, k_out, out_ids, out_values, out_lse);
  const int64_t* ids_at = ids.const_data_ptr<int64_t>();
  const float* values_at = values.const_data_ptr<float>();
  const float* lse_at = lse.const_data_ptr<float>();
  int64_t* out_ids_at = out_ids.data_ptr<int64_t>();
  float* out_values_at = out_values.data_ptr<float>();
  float* out_lse_at = out_lse.data_ptr<float>();
  at::parallel_for(0, sizes.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      MergeTopk(ids_at, values_at, sizes.shards, sizes.rows, sizes.k, row, k_out,
                out_ids_at + row * k_out, out_values_at + row * k_out);
      out_lse_at[row] = MergeLse(lse_at + row, sizes.shards, sizes.rows);
    }
  });
}

}  // namespace kdtree
