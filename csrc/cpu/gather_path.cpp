#include <ATen/Parallel.h>

#include "contracts.h"
#include "kdtree/gather_path.h"
#include "ops.h"

namespace kdtree {

void GatherPathCpu(const at::Tensor& rows, const at::Tensor& path, int64_t num_nodes_per_request,
                   const at::Tensor& out) {
  const GatherSizes sizes = CheckGatherPath(rows, path, num_nodes_per_request, out);
  const char* rows_at = static_cast<const char*>(rows.const_data_ptr());
  const int32_t* path_at = path.const_data_ptr<int32_t>();
  char* out_at = static_cast<char*>(out.data_ptr());
  at::parallel_for(0, sizes.requests, 1, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) {
      GatherPath(rows_at + request * sizes.nodes * sizes.row_bytes, path_at + request * sizes.steps,
                 sizes.nodes, sizes.steps, sizes.row_bytes,
                 out_at + request * sizes.steps * sizes.row_bytes);
    }
  });
}

}  // namespace kdtree
