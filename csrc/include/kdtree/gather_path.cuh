// Gathers the accepted paths' rows on the GPU, one block an output row.
// Cost: one read of the rows on the path, one write of bs * steps rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree {

constexpr int kGatherThreads = 256;

/*!
 * \brief Writes output row blockIdx.x = request * steps + j; a node outside [0, nodes) gives zeros.
 *
 * \tparam Vec What one thread moves at a time; row_vecs of them make a row.
 */
template <typename Vec>
__global__ void __launch_bounds__(kGatherThreads)
    GatherPathKernel(const Vec* __restrict__ rows, const int32_t* __restrict__ path, int64_t nodes,
                     int64_t steps, int64_t row_vecs, Vec* __restrict__ out) {
  const int64_t step = blockIdx.x;
  const int64_t request = step / steps;
  const int64_t node = path[step];
  const bool taken = node >= 0 && node < nodes;
  const Vec* from = rows + (request * nodes + (taken ? node : 0)) * row_vecs;
  Vec* to = out + step * row_vecs;
  for (int64_t i = threadIdx.x; i < row_vecs; i += kGatherThreads) {
    to[i] = taken ? from[i] : Vec{};
  }
}

/*!
 * \brief Gathers every request's rows on `stream`, as many bytes at a time as the addresses allow.
 *
 * \param rows [requests * nodes] rows of row_bytes, an even number, on the device as every pointer.
 * \param path [requests, steps].
 * \param out [requests, steps] rows.
 */
inline cudaError_t LaunchGatherPath(const void* rows, const int32_t* path, int64_t requests,
                                    int64_t nodes, int64_t steps, int64_t row_bytes, void* out,
                                    cudaStream_t stream) {
  if (requests * steps == 0 || row_bytes == 0) return cudaSuccess;
  const auto launch = [&](auto vec) {
    using Vec = decltype(vec);
    GatherPathKernel<Vec><<<static_cast<unsigned>(requests * steps), kGatherThreads, 0, stream>>>(
        static_cast<const Vec*>(rows), path, nodes, steps,
        row_bytes / static_cast<int64_t>(sizeof(Vec)), static_cast<Vec*>(out));
    return cudaGetLastError();
  };
  const uint64_t alignment = reinterpret_cast<uint64_t>(rows) | reinterpret_cast<uint64_t>(out) |
                             static_cast<uint64_t>(row_bytes);
  if (alignment % 16 == 0) return launch(uint4{});
  if (alignment % 4 == 0) return launch(uint32_t{});
  return launch(uint16_t{});
}

}  // namespace kdtree
