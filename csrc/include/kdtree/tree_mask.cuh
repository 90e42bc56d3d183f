// Fills flat attention masks on the GPU, one block a mask row.
#pragma once

#include "kdtree/tree_mask.h"

namespace kdtree {

constexpr int kMaskThreads = 128;

/*!
 * \brief Fills the row of node blockIdx.x of request blockIdx.y.
 */
__global__ void __launch_bounds__(kMaskThreads) TreeMaskKernel(MaskView view) {
  FillMaskRow(view, blockIdx.y, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x),
              kMaskThreads);
}

}  // namespace kdtree
