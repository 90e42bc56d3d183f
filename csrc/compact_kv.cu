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
  if (sizes.buffers == 0 || sizes.requests == 0) return;
  const c10::cuda::CUDAGuard guard(slots.device());
  const dim3 grid(static_cast<unsigned>(sizes.buffers), static_cast<unsigned>(sizes.requests));
  CompactKvKernel<<<grid, kCompactThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(sizes.view);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace kdtree
