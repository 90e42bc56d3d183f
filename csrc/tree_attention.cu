#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "contracts.h"
#include "kdtree/tree_attention.cuh"
#include "ops.h"

namespace kdtree {

void TreeAttentionCuda(const at::Tensor& q, const at::Tensor& k_tail, const at::Tensor& ancestors,
                       const at::Tensor& prefix_out, const at::Tensor& prefix_lse, double scale,
                       const at::Tensor& out) {
  const AttentionSizes sizes =
      CheckTreeAttention(q, k_tail, ancestors, prefix_out, prefix_lse, scale, out);
  const c10::cuda::CUDAGuard guard(q.device());
  std::visit(
      [&](const auto& view) {
        C10_CUDA_CHECK(
            LaunchTreeAttention(view, sizes.requests, c10::cuda::getCurrentCUDAStream()));
      },
      sizes.view);
}

}  // namespace kdtree
