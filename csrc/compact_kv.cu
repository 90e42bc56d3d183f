#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "contracts.h"
#include "kdtree/compact_kv.cuh"
#include "ops.h"

namespace kdtree {

void CompactKvCuda(const at::Tensor& buffer_ptrs, const at::Tensor& row_bytes,
                   const at::Tensor& slots, const at::Tensor& path, const at::Tensor& accept_len) {
  const CompactSizes sizes = CheckCompactKv(buffer_ptrs, row_bytes, slots, path, accept_len);
  const c10::cuda::CUDAGuard guard(slots.device());
  C10_CUDA_CHECK(LaunchCompactKv(sizes.view, sizes.buffers, sizes.requests,
                                 c10::cuda::getCurrentCUDAStream()));
}

}  // namespace kdtree
