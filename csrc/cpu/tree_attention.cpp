#include <ATen/Parallel.h>

#include "contracts.h"
#include "kdtree/tree_attention.h"
#include "ops.h"

namespace kdtree {

void TreeAttentionCpu(const at::Tensor& q, const at::Tensor& k_tail, const at::Tensor& ancestors,
                      const at::Tensor& prefix_out, const at::Tensor& prefix_lse, double scale,
                      const at::Tensor& out) {
  const AttentionSizes sizes =
      CheckTreeAttention(q, k_tail, ancestors, prefix_out, prefix_lse, scale, out);
  std::visit(
      [&](const auto& view) {
        const int64_t rows = sizes.requests * view.nodes * view.heads;
        at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) TreeAttention(view, row);
        });
      },
      sizes.view);
}

}  // namespace kdtree
