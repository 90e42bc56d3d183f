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
  if (sizes.requests == 0) return;
  const c10::cuda::CUDAGuard guard(ancestors.device());
  const dim3 grid(static_cast<unsigned>(sizes.view.nodes), static_cast<unsigned>(sizes.requests));
  TreeMaskKernel<<<grid, kMaskThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(sizes.view);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace kdtree
