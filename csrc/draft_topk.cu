#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "contracts.h"
#include "kdtree/draft_topk.cuh"
#include "ops.h"

namespace kdtree {

void DraftTopkCuda(const at::Tensor& logits, int64_t k, int64_t vocab_start, const at::Tensor& ids,
                   const at::Tensor& values, const at::Tensor& lse) {
  const TopkSizes sizes = CheckDraftTopk(logits, k, vocab_start, ids, values, lse);
  const c10::cuda::CUDAGuard guard(logits.device());
  VisitLogits(logits, [&](const auto* logits_at) {
    C10_CUDA_CHECK(LaunchDraftTopk(logits_at, sizes.rows, sizes.stride, sizes.vocab,
                                   static_cast<int>(k), vocab_start, ids.data_ptr<int64_t>(),
                                   values.data_ptr<float>(), lse.data_ptr<float>(),
                                   c10::cuda::getCurrentCUDAStream()));
  });
}

void MergeTopkCuda(const at::Tensor& ids, const at::Tensor& values, const at::Tensor& lse,
                   int64_t k_out, const at::Tensor& out_ids, const at::Tensor& out_values,
                   const at::Tensor& out_lse) {
  const MergeSizes sizes = CheckMergeTopk(ids, values, lse, k_out, out_ids, out_values, out_lse);
  const c10::cuda::CUDAGuard guard(ids.device());
  C10_CUDA_CHECK(LaunchMergeTopk(
      ids.const_data_ptr<int64_t>(), values.const_data_ptr<float>(), lse.const_data_ptr<float>(),
      static_cast<int>(sizes.shards), sizes.rows, static_cast<int>(sizes.k),
      static_cast<int>(k_out), out_ids.data_ptr<int64_t>(), out_values.data_ptr<float>(),
      out_lse.data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
}

}  // namespace kdtree
