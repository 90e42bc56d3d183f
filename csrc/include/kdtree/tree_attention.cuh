// Attention of a tree's queries to their ancestors, merged with the prefix pass in the same launch.
// One warp a query and head, one block four heads of a query.
//
// What costs: a query and head reads its q (576 values) and its prefix result (512) once and writes
// 512, 3.2 KB in bf16: 0.8 MB for one request of 33 nodes and 8 heads (0.2 us of an H200's memory,
// so latency is all that counts there) and 106 MB for eight of 65 nodes and 64 heads (25 us). A
// request's tail is at most 147 KB, which its blocks share in L2 and the warps of a block in L1.
// A row that is seen costs a head 1088 multiply-adds, some 80 instructions of its warp. A tree of
// depth d shows a query at most d + 1 rows, so the warp walks the set bits of its ancestor words;
// at six rows a query, issuing the larger case above takes as long as reading it. Tensor cores would
// run over all N rows to use those few. Any mask is right; one that shows more costs in proportion.
//
// Latency: everything that does not depend on the mask is loaded at once, the prefix result waits
// in registers for the end, and rows come a batch at a time, so that their loads, their dot
// products and the shuffles that reduce them overlap; softmax is rescaled once a batch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kdtree/tree_attention.h"

namespace kdtree {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = 32 * kAttentionWarps;

/*!
 * \brief A lane's share of a row: 16 latent values as 16-byte pieces that 32 lanes read side by
 * side, and two rotary values, all as they are in memory.
 */
template <typename T>
struct RowShare {
  static constexpr int kLatent = kLatentDim / 32;
  static constexpr int kRope = kRopeDim / 32;
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kPieces = kLatent / (4 * kPerWord);
  static_assert(kRope == 2, "the rotary part of a lane is one load");

  uint32_t latent[kLatent / kPerWord];
  uint32_t rope[kRope / kPerWord];

  __device__ __forceinline__ void LoadLatent(const T* row, int lane) {
    const uint4* pieces = reinterpret_cast<const uint4*>(row) + lane;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint4 words = __ldg(pieces + 32 * piece);
      latent[4 * piece] = words.x;
      latent[4 * piece + 1] = words.y;
      latent[4 * piece + 2] = words.z;
      latent[4 * piece + 3] = words.w;
    }
  }

  __device__ __forceinline__ void LoadKey(const T* row, int lane) {
    LoadLatent(row, lane);
    if constexpr (kPerWord == 2) {
      rope[0] = __ldg(reinterpret_cast<const uint32_t*>(row + kLatentDim) + lane);
    } else {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(row + kLatentDim) + lane);
      rope[0] = words.x;
      rope[1] = words.y;
    }
  }

  // Zeros instead of a row, so that a weight of zero meets no NaN.
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (uint32_t& word : latent) word = 0;
#pragma unroll
    for (uint32_t& word : rope) word = 0;
  }

  static __device__ __forceinline__ float Value(const uint32_t* words, int i) {
    if constexpr (kPerWord == 2) {
      const uint32_t word = words[i / 2];
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return __uint_as_float(words[i]);
    }
  }

  static __device__ __forceinline__ void StoreLatent(const float* values, T* row, int lane) {
    uint32_t words[kLatent / kPerWord];
#pragma unroll
    for (int i = 0; i < kLatent / kPerWord; ++i) {
      if constexpr (kPerWord == 2) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words[i] = uint32_t{__bfloat16_as_ushort(pair.x)} |
                   uint32_t{__bfloat16_as_ushort(pair.y)} << 16;
      } else {
        words[i] = __float_as_uint(values[i]);
      }
    }
    uint4* pieces = reinterpret_cast<uint4*>(row) + lane;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      pieces[32 * piece] = make_uint4(words[4 * piece], words[4 * piece + 1], words[4 * piece + 2],
                                      words[4 * piece + 3]);
    }
  }
};

/*!
 * \brief Takes the lowest set bit out of 128; -1 when none is left.
 */
__device__ __forceinline__ int PopLowest(uint64_t& low, uint64_t& high) {
  if (low != 0) {
    const int bit = __ffsll(static_cast<long long>(low)) - 1;
    low &= low - 1;
    return bit;
  }
  if (high != 0) {
    const int bit = __ffsll(static_cast<long long>(high)) - 1;
    high &= high - 1;
    return 64 + bit;
  }
  return -1;
}

__device__ __forceinline__ float MultiplyAdd(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double MultiplyAdd(double a, double b, double c) {
  return __fma_rn(a, b, c);
}

/*!
 * \brief Attends head 4 * blockIdx.y + warp of query blockIdx.x = request * nodes + node.
 */
template <typename T>
__global__ void __launch_bounds__(kAttentionThreads) TreeAttentionKernel(AttentionView<T> view) {
  using Sum = typename AttentionSum<T>::Type;
  using Share = RowShare<T>;
  // Rows in flight: what fits in registers beside the sums.
  constexpr int kBatch = 8 / sizeof(T);
  const Sum infinity = static_cast<Sum>(__int_as_float(0x7f800000));

  const int lane = threadIdx.x % 32;
  const int head = static_cast<int>(blockIdx.y) * kAttentionWarps + threadIdx.x / 32;
  if (head >= view.heads) return;
  const int64_t query = blockIdx.x;
  const int64_t request = blockIdx.x / static_cast<unsigned>(view.nodes);
  const int64_t node = query - request * view.nodes;
  const int64_t row = query * view.heads + head;
  const T* keys = view.k_tail + request * view.nodes * kKeyDim;

  const int64_t* words = view.ancestors + query * view.words;
  // Bits from view.nodes on name no row.
  const bool wide = view.words > 1;
  const uint64_t all = ~uint64_t{0};
  const uint64_t last = all >> (63 - (view.nodes - 1) % 64);
  uint64_t low = static_cast<uint64_t>(__ldg(words)) & (wide ? all : last);
  uint64_t high = wide ? static_cast<uint64_t>(__ldg(words + 1)) & last : 0;
  const float lse = __ldg(view.prefix_lse + (request * view.heads + head) * view.nodes + node);
  Share packed_q;
  packed_q.LoadKey(view.q + row * kKeyDim, lane);
  const bool has_prefix = !isinf(lse);
  Share prefix;
  prefix.Clear();
  if (has_prefix) prefix.LoadLatent(view.prefix_out + row * kLatentDim, lane);

  Sum q_latent[Share::kLatent];
  Sum q_rope[Share::kRope];
#pragma unroll
  for (int i = 0; i < Share::kLatent; ++i) q_latent[i] = Share::Value(packed_q.latent, i);
#pragma unroll
  for (int i = 0; i < Share::kRope; ++i) q_rope[i] = Share::Value(packed_q.rope, i);

  Sum greatest = -infinity;
  Sum total = 0;
  Sum weighted[Share::kLatent];
#pragma unroll
  for (Sum& value : weighted) value = 0;

  while ((low | high) != 0) {
    Share key[kBatch];
    int seen[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      seen[k] = PopLowest(low, high);
      if (seen[k] >= 0) {
        key[k].LoadKey(keys + int64_t{seen[k]} * kKeyDim, lane);
      } else {
        key[k].Clear();
      }
    }
    Sum score[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      Sum sum = 0;
#pragma unroll
      for (int i = 0; i < Share::kRope; ++i) {
        sum = MultiplyAdd(q_rope[i], static_cast<Sum>(Share::Value(key[k].rope, i)), sum);
      }
#pragma unroll
      for (int i = 0; i < Share::kLatent; ++i) {
        sum = MultiplyAdd(q_latent[i], static_cast<Sum>(Share::Value(key[k].latent, i)), sum);
      }
      score[k] = sum;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        score[k] += __shfl_xor_sync(0xffffffffu, score[k], step);
      }
    }
    Sum raised = greatest;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      score[k] = seen[k] >= 0 ? score[k] * static_cast<Sum>(view.scale) : -infinity;
      raised = max(raised, score[k]);
    }
    const Sum shrink = exp(greatest - raised);
    greatest = raised;
    total *= shrink;
#pragma unroll
    for (Sum& value : weighted) value *= shrink;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const Sum weight = exp(score[k] - greatest);
      total += weight;
#pragma unroll
      for (int i = 0; i < Share::kLatent; ++i) {
        weighted[i] =
            MultiplyAdd(weight, static_cast<Sum>(Share::Value(key[k].latent, i)), weighted[i]);
      }
    }
  }

  Sum prefix_weight = 0;
  if (has_prefix) {
    const Sum raised = max(greatest, static_cast<Sum>(lse));
    const Sum shrink = exp(greatest - raised);
    prefix_weight = exp(static_cast<Sum>(lse) - raised);
    total = MultiplyAdd(total, shrink, prefix_weight);
#pragma unroll
    for (Sum& value : weighted) value *= shrink;
  }
  // Only a query that sees nothing at all has a total of zero; its output is zero.
  const Sum norm = total == 0 ? Sum{0} : Sum{1} / total;
  float result[Share::kLatent];
#pragma unroll
  for (int i = 0; i < Share::kLatent; ++i) {
    const Sum value = static_cast<Sum>(Share::Value(prefix.latent, i));
    result[i] = static_cast<float>(MultiplyAdd(prefix_weight, value, weighted[i]) * norm);
  }
  Share::StoreLatent(result, view.out + row * kLatentDim, lane);
}

/*!
 * \brief Attends every query of every request on `stream`.
 *
 * \param view Pointers on the device; q, k_tail, prefix_out and out start at multiples of 16 bytes,
 * nodes <= kMaxNodes, heads <= 65535; out overlaps no input.
 */
template <typename T>
inline cudaError_t LaunchTreeAttention(const AttentionView<T>& view, int64_t requests,
                                       cudaStream_t stream) {
  if (requests == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(requests * view.nodes),
                  static_cast<unsigned>((view.heads + kAttentionWarps - 1) / kAttentionWarps));
  TreeAttentionKernel<T><<<grid, kAttentionThreads, 0, stream>>>(view);
  return cudaGetLastError();
}

}  // namespace kdtree
