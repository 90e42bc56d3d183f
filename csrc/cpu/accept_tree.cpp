#include <ATen/Parallel.h>

#include "contracts.h"
#include "kdtree/accept_tree.h"
#include "ops.h"

namespace kdtree {

void AcceptTreeCpu(const at::Tensor& tokens, const at::Tensor& next_token,
                   const at::Tensor& next_sibling, const at::Tensor& num_nodes,
                   const at::Tensor& predictions, const at::Tensor& prefix_lens, int64_t max_depth,
                   const at::Tensor& path, const at::Tensor& accept_len, const at::Tensor& bonus,
                   const at::Tensor& out_tokens, const at::Tensor& new_seq_lens) {
  const AcceptSizes sizes =
      CheckAcceptTree(tokens, next_token, next_sibling, num_nodes, predictions, prefix_lens,
                      max_depth, path, accept_len, bonus, out_tokens, new_seq_lens);
  at::parallel_for(0, sizes.requests, 16, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) AcceptTree(sizes.view, request);
  });
}

}  // namespace kdtree
