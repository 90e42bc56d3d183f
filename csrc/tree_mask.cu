#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "contracts.h"
#include "kdtree/tree_mask.cuh"
#include "ops.h"

namespace kdtree {

void TreeMaskCuda(const at::Tensor& ancestors, const at::Tensor& prefix_lens,
                  const at::Tensor& mask, const at::Tensor& mask_indptr, bool write_prefix) {
  const MaskSizes sizes = CheckTreeMask(ancestors, prefix_lens, mask, mask_indptr, write_prefix);
  const c10::cuda::CUDAGuard guard(ancestors.device());
  C10_CUDA_CHECK(LaunchTreeMask(sizes.view, sizes.requests, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace kdtree
