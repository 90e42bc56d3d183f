#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <type_traits>

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
  if (sizes.requests == 0) return;
  const c10::cuda::CUDAGuard guard(ids.device());
  const size_t shared = sizeof(float) * sizes.depths * sizes.candidates;
  const auto launch = [&](auto slots) {
    BuildTreeKernel<decltype(slots)::value>
        <<<static_cast<unsigned>(sizes.requests), kBuildTreeThreads, shared,
           c10::cuda::getCurrentCUDAStream()>>>(
            ids.const_data_ptr<int64_t>(), log_probs.const_data_ptr<float>(),
            root.const_data_ptr<int64_t>(), prefix_lens.const_data_ptr<int64_t>(), sizes.depths,
            sizes.candidates, sizes.budget, sizes.trees);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  if (sizes.budget <= 32) {
    launch(std::integral_constant<int, 1>{});
  } else if (sizes.budget <= 64) {
    launch(std::integral_constant<int, 2>{});
  } else {
    launch(std::integral_constant<int, 4>{});
  }
}

}  // namespace kdtree
