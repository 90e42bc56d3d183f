#include <ATen/Parallel.h>

#include "contracts.h"
#include "kdtree/build_tree.h"
#include "ops.h"

namespace kdtree {

void BuildTreeCpu(const at::Tensor& ids, const at::Tensor& log_probs, const at::Tensor& root,
                  const at::Tensor& prefix_lens, int64_t budget, const at::Tensor& tokens,
                  const at::Tensor& parents, const at::Tensor& depths, const at::Tensor& log_mass,
                  const at::Tensor& positions, const at::Tensor& ancestors,
                  const at::Tensor& next_token, const at::Tensor& next_sibling,
                  const at::Tensor& num_nodes) {
  const BuildSizes sizes =
      CheckBuildTree(ids, log_probs, root, prefix_lens, budget, tokens, parents, depths, log_mass,
                     positions, ancestors, next_token, next_sibling, num_nodes);
  const int64_t* ids_at = ids.const_data_ptr<int64_t>();
  const float* log_probs_at = log_probs.const_data_ptr<float>();
  const int64_t* root_at = root.const_data_ptr<int64_t>();
  const int64_t* prefix_lens_at = prefix_lens.const_data_ptr<int64_t>();
  const int64_t cells = static_cast<int64_t>(sizes.depths) * sizes.candidates;
  at::parallel_for(0, sizes.requests, 1, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) {
      BuildTree(ids_at + request * cells, log_probs_at + request * cells, root_at[request],
                prefix_lens_at[request], sizes.depths, sizes.candidates, sizes.budget,
                sizes.trees.Row(request));
    }
  });
}

}  // namespace kdtree
