// Fills flat attention masks on the GPU, one block a mask row.
#pragma once

#include <cuda_runtime.h>

#include "kdtree/tree_mask.h"

namespace kdtree {

constexpr int kMaskThreads = 128;

/*!
 * \brief Fills the row of node blockIdx.x of request blockIdx.y.
 */
static __global__ void __launch_bounds__(kMaskThreads) TreeMaskKernel(MaskView view) {
  FillMaskRow(view, blockIdx.y, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x),
              kMaskThreads);
}

/*!
 * \brief Fills every request's rows on `stream`; requests <= 65535.
 */
inline cudaError_t LaunchTreeMask(const MaskView& view, int64_t requests, cudaStream_t stream) {
  if (requests == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(view.nodes), static_cast<unsigned>(requests));
  TreeMaskKernel<<<grid, kMaskThreads, 0, stream>>>(view);
  return cudaGetLastError();
}

}  // namespace kdtree
