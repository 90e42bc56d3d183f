// Moves the accepted path's KV rows to the front on the GPU: one launch for every buffer.
//
// A block owns one (buffer, request); a thread owns a column of the row, as wide as the addresses
// allow (16 bytes for every usual KV row), and carries it through all moves. Columns do not meet,
// so there is no barrier; a thread loads a batch of rows before it stores any, which overlaps the
// loads' latency and is safe because path[j] >= j ascends.
// Cost: one read and one write of accept_len rows a buffer.
#pragma once

#include <cuda_runtime.h>

#include "kdtree/compact_kv.h"

namespace kdtree {

constexpr int kCompactThreads = 128;
constexpr int kCompactBatch = 8;

template <typename Vec>
__device__ __forceinline__ void CompactColumns(char* base, int64_t row_bytes, const RowMove* moves,
                                               int count) {
  const int64_t columns = row_bytes / static_cast<int64_t>(sizeof(Vec));
  for (int64_t column = threadIdx.x; column < columns; column += kCompactThreads) {
    char* at = base + column * static_cast<int64_t>(sizeof(Vec));
    for (int first = 0; first < count; first += kCompactBatch) {
      Vec held[kCompactBatch];
#pragma unroll
      for (int j = 0; j < kCompactBatch; ++j) {
        if (first + j < count) {
          held[j] = *reinterpret_cast<const Vec*>(at + moves[first + j].source * row_bytes);
        }
      }
#pragma unroll
      for (int j = 0; j < kCompactBatch; ++j) {
        if (first + j < count) {
          *reinterpret_cast<Vec*>(at + moves[first + j].target * row_bytes) = held[j];
        }
      }
    }
  }
}

/*!
 * \brief Compacts request blockIdx.y in buffer blockIdx.x; view.nodes <= kMaxNodes.
 */
static __global__ void __launch_bounds__(kCompactThreads) CompactKvKernel(CompactView view) {
  __shared__ RowMove s_moves[kMaxNodes];
  __shared__ int s_count;

  const int64_t buffer = blockIdx.x;
  const int64_t request = blockIdx.y;
  const int moves = MovesOf(view, request);
  if (moves < 1) return;
  for (int j = 1 + threadIdx.x; j <= moves; j += kCompactThreads) {
    s_moves[j - 1] = MoveOf(view, request, j);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int count = 0;
    for (int j = 0; j < moves; ++j) {
      if (s_moves[j].source >= 0) s_moves[count++] = s_moves[j];
    }
    s_count = count;
  }
  __syncthreads();

  const int count = s_count;
  const int64_t row_bytes = view.row_bytes[buffer];
  const uint64_t address = static_cast<uint64_t>(view.buffer_ptrs[buffer]);
  char* base = reinterpret_cast<char*>(address);
  const uint64_t alignment = address | static_cast<uint64_t>(row_bytes);
  if (alignment % 16 == 0) {
    CompactColumns<uint4>(base, row_bytes, s_moves, count);
  } else if (alignment % 8 == 0) {
    CompactColumns<uint2>(base, row_bytes, s_moves, count);
  } else if (alignment % 4 == 0) {
    CompactColumns<uint32_t>(base, row_bytes, s_moves, count);
  } else if (alignment % 2 == 0) {
    CompactColumns<uint16_t>(base, row_bytes, s_moves, count);
  } else {
    CompactColumns<uint8_t>(base, row_bytes, s_moves, count);
  }
}

/*!
 * \brief Compacts every request in each of `buffers` buffers on `stream`; requests <= 65535.
 */
inline cudaError_t LaunchCompactKv(const CompactView& view, int64_t buffers, int64_t requests,
                                   cudaStream_t stream) {
  if (buffers == 0 || requests == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(buffers), static_cast<unsigned>(requests));
  CompactKvKernel<<<grid, kCompactThreads, 0, stream>>>(view);
  return cudaGetLastError();
}

}  // namespace kdtree
