// The k greatest logits of each row with their log-sum-exp, and the join of several such lists, on
// the GPU. One block a row; the result does not depend on scheduling.
//
// An element's rank is the 64-bit number (value in order-preserving bits, complement of the id), so
// all elements differ and "value, then smaller id" is one comparison. Three steps:
//   1. every thread takes the greatest of its share; the k-th greatest of those 1,024 numbers
//      bounds the k-th element of the row from below, since k elements reach it;
//   2. a second pass collects what reaches the bound (about 1.07 k elements at k = 127 in a row
//      without structure) and sums the exponentials;
//   3. each collected element counts the collected ones before it: its place in the result.
// Only a row whose greatest elements crowd in few threads' shares overflows step 2; it then
// descends bit by bit to the exact bound, a full pass a bit.
// Cost: two reads of the row (the second mostly from L2) by one SM: bound by one SM's bandwidth
// when rows are few, by memory when they are many.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree {

constexpr int kTopkThreads = 1024;
constexpr int kTopkWarps = kTopkThreads / 32;
constexpr int kTopkCollected = 1024;
constexpr int kMergeThreads = 256;

__device__ __forceinline__ float MinusInfinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float Sanitized(float value) {
  return value != value ? MinusInfinity() : value;
}

/*!
 * \brief Order-preserving bits of a sanitized value; -0.0 and 0.0 share theirs.
 */
__device__ __forceinline__ uint32_t OrderedBits(float value) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint64_t RankOf(float value, int64_t id) {
  const uint32_t id_rank = 0xffffffffu - static_cast<uint32_t>(id);
  return static_cast<uint64_t>(OrderedBits(value)) << 32 | id_rank;
}

/*!
 * \brief Calls visit(value, id) for every element of a row, each by one thread of the block; 16
 * bytes a load where the row's address allows.
 */
template <typename T, typename Visit>
__device__ __forceinline__ void ForEachLogit(const T* row, int64_t vocab, const Visit& visit) {
  constexpr int kVec = 16 / sizeof(T);
  const auto address = reinterpret_cast<uintptr_t>(row);
  const int64_t misaligned = static_cast<int64_t>(address % 16 / sizeof(T));
  int64_t head = misaligned == 0 ? 0 : kVec - misaligned;
  if (head > vocab) head = vocab;
  const int64_t vecs = (vocab - head) / kVec;
  for (int64_t i = threadIdx.x; i < head; i += kTopkThreads) {
    visit(Sanitized(static_cast<float>(row[i])), i);
  }
  for (int64_t v = threadIdx.x; v < vecs; v += kTopkThreads) {
    const int64_t first = head + v * kVec;
    union {
      uint4 raw;
      unsigned char bytes[16];
    } held;
    held.raw = *reinterpret_cast<const uint4*>(row + first);
    const T* elements = reinterpret_cast<const T*>(held.bytes);
#pragma unroll
    for (int e = 0; e < kVec; ++e) visit(Sanitized(static_cast<float>(elements[e])), first + e);
  }
  for (int64_t i = head + vecs * kVec + threadIdx.x; i < vocab; i += kTopkThreads) {
    visit(Sanitized(static_cast<float>(row[i])), i);
  }
}

/*!
 * \brief Joins a value a thread over the block, in a fixed order; every thread gets the result.
 *
 * \param s_warp [kTopkWarps] in shared memory.
 */
template <typename T, typename Join>
__device__ __forceinline__ T BlockReduce(T value, T* s_warp, const Join& join) {
  for (int step = 16; step > 0; step /= 2) {
    value = join(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  if (threadIdx.x % 32 == 0) s_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = s_warp[threadIdx.x % kTopkWarps];
  for (int step = 16; step > 0; step /= 2) {
    value = join(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  __syncthreads();
  return value;
}

/*!
 * \brief Top-k and log-sum-exp of row blockIdx.x.
 *
 * \tparam T float, or a 16-bit type that converts to float.
 * \param stride Elements from one row to the next.
 * \param k At most kTopkThreads / 8 = 128 and at most vocab.
 */
template <typename T>
__global__ void __launch_bounds__(kTopkThreads)
    DraftTopkKernel(const T* __restrict__ logits, int64_t stride, int64_t vocab, int k,
                    int64_t vocab_start, int64_t* __restrict__ ids, float* __restrict__ values,
                    float* __restrict__ lse) {
  __shared__ uint64_t s_collected[kTopkCollected];
  __shared__ uint64_t s_warp[kTopkWarps];
  __shared__ float s_warp_sum[kTopkWarps];
  __shared__ unsigned s_count;

  const int64_t row_index = blockIdx.x;
  const T* row = logits + row_index * stride;

  // No element has rank 0, so 0 marks a thread without a share.
  uint64_t mine = 0;
  ForEachLogit(row, vocab, [&](float value, int64_t id) {
    const uint64_t rank = RankOf(value, id);
    mine = rank > mine ? rank : mine;
  });

  uint64_t bound = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t trial = bound | uint64_t{1} << bit;
    if (__syncthreads_count(mine >= trial) >= k) bound = trial;
  }

  const uint64_t top =
      BlockReduce(mine, s_warp, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  const int64_t top_id = 0xffffffffu - static_cast<uint32_t>(top);
  const float greatest = Sanitized(static_cast<float>(row[top_id]));
  const bool infinite = (__float_as_uint(greatest) & 0x7fffffffu) == 0x7f800000u;
  if (threadIdx.x == 0) s_count = 0;
  __syncthreads();

  float sum = 0.0f;
  ForEachLogit(row, vocab, [&](float value, int64_t id) {
    if (!infinite) sum += expf(value - greatest);
    const uint64_t rank = RankOf(value, id);
    if (rank >= bound) {
      const unsigned at = atomicAdd(&s_count, 1u);
      if (at < kTopkCollected) s_collected[at] = rank;
    }
  });
  sum = BlockReduce(sum, s_warp_sum, [](float a, float b) { return __fadd_rn(a, b); });
  if (threadIdx.x == 0) lse[row_index] = infinite ? greatest : greatest + logf(sum);

  if (s_count > kTopkCollected) {
    bound = 0;
    for (int bit = 63; bit >= 0; --bit) {
      const uint64_t trial = bound | uint64_t{1} << bit;
      __syncthreads();
      if (threadIdx.x == 0) s_count = 0;
      __syncthreads();
      unsigned reached = 0;
      ForEachLogit(row, vocab,
                   [&](float value, int64_t id) { reached += RankOf(value, id) >= trial; });
      reached = __reduce_add_sync(0xffffffffu, reached);
      if (threadIdx.x % 32 == 0) atomicAdd(&s_count, reached);
      __syncthreads();
      if (s_count >= static_cast<unsigned>(k)) bound = trial;
    }
    __syncthreads();
    if (threadIdx.x == 0) s_count = 0;
    __syncthreads();
    ForEachLogit(row, vocab, [&](float value, int64_t id) {
      const uint64_t rank = RankOf(value, id);
      if (rank >= bound) s_collected[atomicAdd(&s_count, 1u)] = rank;
    });
    __syncthreads();
  }

  const int count = static_cast<int>(s_count);
  for (int i = threadIdx.x; i < count; i += kTopkThreads) {
    const uint64_t rank = s_collected[i];
    int place = 0;
    for (int j = 0; j < count; ++j) place += s_collected[j] > rank;
    if (place < k) {
      const int64_t id = 0xffffffffu - static_cast<uint32_t>(rank);
      ids[row_index * k + place] = id + vocab_start;
      values[row_index * k + place] = Sanitized(static_cast<float>(row[id]));
    }
  }
}

/*!
 * \brief Joins row blockIdx.x of `shards` lists of k entries. An entry's place is the number of
 * entries before it, counted over all (shards * k)^2 pairs: some hundreds of cached reads a thread
 * at TP 8.
 *
 * \param ids [shards, rows, k], values [shards, rows, k], lse [shards, rows].
 */
static __global__ void __launch_bounds__(kMergeThreads)
    MergeTopkKernel(const int64_t* __restrict__ ids, const float* __restrict__ values,
                    const float* __restrict__ lse, int shards, int64_t rows, int k, int k_out,
                    int64_t* __restrict__ out_ids, float* __restrict__ out_values,
                    float* __restrict__ out_lse) {
  const int64_t row = blockIdx.x;
  const int entries = shards * k;
  for (int i = threadIdx.x; i < entries; i += kMergeThreads) {
    const int64_t at = (i / k * rows + row) * k + i % k;
    const float value = Sanitized(values[at]);
    const int64_t id = ids[at];
    int place = 0;
    for (int shard = 0; shard < shards; ++shard) {
      const int64_t offset = (shard * rows + row) * k;
      for (int j = 0; j < k; ++j) {
        const float other = Sanitized(values[offset + j]);
        const int64_t other_id = ids[offset + j];
        place += other > value ||
                 (other == value &&
                  (other_id < id || (other_id == id && shard * k + j < i)));
      }
    }
    if (place < k_out) {
      out_ids[row * k_out + place] = id;
      out_values[row * k_out + place] = value;
    }
  }
  if (threadIdx.x == 0) {
    float greatest = MinusInfinity();
    for (int shard = 0; shard < shards; ++shard) {
      greatest = fmaxf(greatest, Sanitized(lse[shard * rows + row]));
    }
    if ((__float_as_uint(greatest) & 0x7fffffffu) != 0x7f800000u) {
      float sum = 0.0f;
      for (int shard = 0; shard < shards; ++shard) {
        sum += expf(Sanitized(lse[shard * rows + row]) - greatest);
      }
      greatest += logf(sum);
    }
    out_lse[row] = greatest;
  }
}

/*!
 * \brief Top-k and log-sum-exp of every row on `stream`.
 *
 * \param logits [rows, vocab], rows `stride` elements apart, on the device as every pointer here.
 * \param ids [rows, k], values [rows, k], lse [rows].
 */
template <typename T>
cudaError_t LaunchDraftTopk(const T* logits, int64_t rows, int64_t stride, int64_t vocab, int k,
                            int64_t vocab_start, int64_t* ids, float* values, float* lse,
                            cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  DraftTopkKernel<<<static_cast<unsigned>(rows), kTopkThreads, 0, stream>>>(
      logits, stride, vocab, k, vocab_start, ids, values, lse);
  return cudaGetLastError();
}

/*!
 * \brief Joins every row's lists on `stream`.
 *
 * \param ids [shards, rows, k], values [shards, rows, k], lse [shards, rows], on the device as
 * every pointer here.
 * \param out_ids [rows, k_out], out_values [rows, k_out], out_lse [rows].
 */
inline cudaError_t LaunchMergeTopk(const int64_t* ids, const float* values, const float* lse,
                                   int shards, int64_t rows, int k, int k_out, int64_t* out_ids,
                                   float* out_values, float* out_lse, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  MergeTopkKernel<<<static_cast<unsigned>(rows), kMergeThreads, 0, stream>>>(
      ids, values, lse, shards, rows, k, k_out, out_ids, out_values, out_lse);
  return cudaGetLastError();
}

}  // namespace kdtree
