#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "contracts.h"
#include "kdtree/build_tree.cuh"
#include "ops.h"

namespace kdtree {

void BuildTreeCuda(const at::Tensor& ids, const at::Tensor& log_probs, const at::Tensor& root,
                   const at::Tensor& prefix_lens, int64_t budget, const at::Tensor& tokens,
                   const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& log_mass,
                   const at::Tensor& positions, const at::Tensor& ancestors,
                   const at::Tensor& next_token, const at::Tensor& next_sibling,
                   const at::Tensor& num_nodes) {
  const BuildSizes sizes =
      CheckBuildTree(ids, log_probs, root, prefix_lens, budget, tokens, parents, depths, log_mass,
                     positions, ancestors, next_token, next_sibling, num_nodes);
  const c10::cuda::CUDAGuard guard(ids.device());
  C10_CUDA_CHECK(LaunchBuildTree(
      ids.const_data_ptr<int64_t>(), log_probs.const_data_ptr<float>(),
      root.const_data_ptr<int64_t>(), prefix_lens.const_data_ptr<int64_t>(), sizes.requests,
      sizes.depths, sizes.candidates, sizes.budget, sizes.trees,
      c10::cuda::getCurrentCUDAStream()));
}

}  // namespace kdtree
