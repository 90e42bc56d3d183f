#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "contracts.h"
#include "kdtree/gather_path.cuh"
#include "ops.h"

namespace kdtree {

void GatherPathCuda(const at::Tensor& rows, const at::Tensor& path, int64_t num_nodes_per_request,
                    const at::Tensor& out) {
  const GatherSizes sizes = CheckGatherPath(rows, path, num_nodes_per_request, out);
  const c10::cuda::CUDAGuard guard(rows.device());
  C10_CUDA_CHECK(LaunchGatherPath(rows.const_data_ptr(), path.const_data_ptr<int32_t>(),
                                  sizes.requests, sizes.nodes, sizes.steps, sizes.row_bytes,
                                  out.data_ptr(), c10::cuda::getCurrentCUDAStream()));
}

}  // namespace kdtree
