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
  const int64_t out_rows = sizes.requests * sizes.steps;
  if (out_rows == 0 || sizes.row_bytes == 0) return;
  const c10::cuda::CUDAGuard guard(rows.device());
  const auto launch = [&](auto vec) {
    using Vec = decltype(vec);
    GatherPathKernel<Vec><<<static_cast<unsigned>(out_rows), kGatherThreads, 0,
                            c10::cuda::getCurrentCUDAStream()>>>(
        static_cast<const Vec*>(rows.const_data_ptr()), path.const_data_ptr<int32_t>(),
        sizes.nodes, sizes.steps, sizes.row_bytes / static_cast<int64_t>(sizeof(Vec)),
        static_cast<Vec*>(out.data_ptr()));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  const uint64_t alignment = reinterpret_cast<uint64_t>(rows.const_data_ptr()) |
                             reinterpret_cast<uint64_t>(out.data_ptr()) |
                             static_cast<uint64_t>(sizes.row_bytes);
  if (alignment % 16 == 0) {
    launch(uint4{});
  } else if (alignment % 4 == 0) {
    launch(uint32_t{});
  } else {
    launch(uint16_t{});
  }
}

}  // namespace kdtree
