#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "contracts.h"
#include "kdtree/accept_tree.cuh"
#include "ops.h"

namespace kdtree {

void AcceptTreeCuda(const at::Tensor& tokens, const at::Tensor& next_token,
                    const at::Tensor& next_sibling, const at::Tensor& num_nodes,
                    const at::Tensor& predictions, const at::Tensor& prefix_lens, int64_t max_depth,
                    const at::Tensor& path, const at::Tensor& accept_len, const at::Tensor& bonus,
                    const at::Tensor& out_tokens, const at::Tensor& new_seq_lens) {
  const AcceptSizes sizes =
      CheckAcceptTree(tokens, next_token, next_sibling, num_nodes, predictions, prefix_lens,
                      max_depth, path, accept_len, bonus, out_tokens, new_seq_lens);
  const c10::cuda::CUDAGuard guard(tokens.device());
  C10_CUDA_CHECK(
      LaunchAcceptTree(sizes.view, sizes.requests, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace kdtree
