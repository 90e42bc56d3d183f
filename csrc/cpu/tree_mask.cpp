#include <ATen/Parallel.h>

#include "contracts.h"
#include "kdtree/tree_mask.h"
#include "ops.h"

namespace kdtree {

void TreeMaskCpu(const at::Tensor& ancestors, const at::Tensor& prefix_lens, const at::Tensor& mask,
                 const at::Tensor& mask_indptr, bool write_prefix) {
  const MaskSizes sizes = CheckTreeMask(ancestors, prefix_lens, mask, mask_indptr, write_prefix);
  at::parallel_for(0, sizes.requests, 1, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) {
      for (int node = 0; node < sizes.view.nodes; ++node) {
        FillMaskRow(sizes.view, request, node, 0, 1);
      }
    }
  });
}

}  // namespace kdtree
