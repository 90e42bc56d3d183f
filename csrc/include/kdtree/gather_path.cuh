// Gathers the accepted paths' rows on the GPU, one block an output row.
// Cost: one read of the rows on the path, one write of bs * steps rows.
#pragma once

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

}  // namespace kdtree
