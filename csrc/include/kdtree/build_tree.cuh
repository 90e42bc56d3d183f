// Best-first draft trees on the GPU, one block a request.
//
// The frontier never holds more items than nodes were popped, plus one, so it lives in the
// registers of one warp (kSlots items a lane) and needs no heap: a pop is a maximum over the lane's
// slots, two warp reductions of the key's halves and, only when keys are bit-equal, four of the
// rank path.
// Cost: `budget` dependent pops, which is all of the time that counts; log-probs are read from
// global memory once, the tree is written once, coalesced.
#pragma once

#include <cuda_runtime.h>

#include "kdtree/tree.h"

namespace kdtree {

constexpr int kBuildTreeThreads = 128;
constexpr unsigned kFullWarp = 0xffffffffu;

/*!
 * \brief Maps a finite double to an unsigned integer of the same order; -0.0 and 0.0 map to one
 * value, and 0 is free to mean an empty slot.
 */
__device__ __forceinline__ uint64_t OrderedKey(double value) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(__dadd_rn(value, 0.0)));
  return (bits >> 63) != 0 ? ~bits : bits | (uint64_t{1} << 63);
}

/*!
 * \brief Narrows `lanes` to those whose word is the greatest among them (warp-uniform result).
 */
__device__ __forceinline__ unsigned KeepGreatest(unsigned lanes, uint32_t word, int lane) {
  const bool runs = (lanes >> lane) & 1u;
  const uint32_t greatest = __reduce_max_sync(kFullWarp, runs ? word : 0u);
  return __ballot_sync(kFullWarp, runs && word == greatest);
}

__device__ __forceinline__ uint64_t ShuffleWord(uint64_t word, int lane) {
  return __shfl_sync(kFullWarp, static_cast<unsigned long long>(word), lane);
}

/*!
 * \brief The identity of a frontier item besides its key and path, a byte each.
 */
struct ItemTag {
  uint32_t packed;
  __device__ __forceinline__ static ItemTag Make(int parent, int elder, int depth, int rank) {
    return {static_cast<uint32_t>(parent) | static_cast<uint32_t>(elder) << 8 |
            static_cast<uint32_t>(depth) << 16 | static_cast<uint32_t>(rank) << 24};
  }
  __device__ __forceinline__ int parent() const { return packed & 0xff; }
  __device__ __forceinline__ int elder() const { return packed >> 8 & 0xff; }
  __device__ __forceinline__ int depth() const { return packed >> 16 & 0xff; }
  __device__ __forceinline__ int rank() const { return packed >> 24; }
};

/*!
 * \brief Builds the tree of request blockIdx.x.
 *
 * \tparam kSlots Frontier items a lane; budget <= 32 * kSlots.
 * \param ids [bs, depths, candidates].
 * \param log_probs [bs, depths, candidates]; depths * candidates floats of dynamic shared memory
 * hold the request's.
 */
template <int kSlots>
__global__ void __launch_bounds__(kBuildTreeThreads)
    BuildTreeKernel(const int64_t* __restrict__ ids, const float* __restrict__ log_probs,
                    const int64_t* __restrict__ root, const int64_t* __restrict__ prefix_lens,
                    int depths, int candidates, int budget, TreeView trees) {
  extern __shared__ float s_log_probs[];
  __shared__ ItemTag s_tag[kMaxNodes];
  __shared__ float s_mass[kMaxNodes];
  __shared__ int s_next_token[kMaxNodes];
  __shared__ int s_next_sibling[kMaxNodes];
  __shared__ int s_count;

  const int64_t request = blockIdx.x;
  const int thread = threadIdx.x;
  const int cells = depths * candidates;
  for (int i = thread; i < cells; i += kBuildTreeThreads) {
    s_log_probs[i] = log_probs[request * cells + i];
  }
  for (int i = thread; i < kMaxNodes; i += kBuildTreeThreads) {
    s_next_token[i] = -1;
    s_next_sibling[i] = -1;
  }
  __syncthreads();

  if (thread < 32) {
    const int lane = thread;
    uint64_t order[kSlots];
    double key[kSlots];
    RankPath path[kSlots];
    ItemTag tag[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      order[slot] = 0;
      key[slot] = 0.0;
      path[slot] = {0, 0};
      tag[slot] = {0};
    }
    if (lane == 0 && IsFinite(s_log_probs[0])) {
      key[0] = static_cast<double>(s_log_probs[0]);
      order[0] = OrderedKey(key[0]);
      path[0] = Advance({0, 0}, 1);
      tag[0] = ItemTag::Make(0, 0, 1, 0);
    }

    int node = 1;
    for (; node <= budget; ++node) {
      int best_slot = 0;
      uint64_t best_order = order[0];
      double best_key = key[0];
      RankPath best_path = path[0];
      ItemTag best_tag = tag[0];
#pragma unroll
      for (int slot = 1; slot < kSlots; ++slot) {
        const bool better = order[slot] > best_order ||
                            (order[slot] == best_order && path[slot] < best_path);
        best_slot = better ? slot : best_slot;
        best_order = better ? order[slot] : best_order;
        best_key = better ? key[slot] : best_key;
        best_path.hi = better ? path[slot].hi : best_path.hi;
        best_path.lo = better ? path[slot].lo : best_path.lo;
        best_tag.packed = better ? tag[slot].packed : best_tag.packed;
      }

      unsigned lanes = __ballot_sync(kFullWarp, best_order != 0);
      if (lanes == 0) break;
      lanes = KeepGreatest(lanes, static_cast<uint32_t>(best_order >> 32), lane);
      lanes = KeepGreatest(lanes, static_cast<uint32_t>(best_order), lane);
      if ((lanes & (lanes - 1)) != 0) {
        lanes = KeepGreatest(lanes, ~static_cast<uint32_t>(best_path.hi >> 32), lane);
        lanes = KeepGreatest(lanes, ~static_cast<uint32_t>(best_path.hi), lane);
        lanes = KeepGreatest(lanes, ~static_cast<uint32_t>(best_path.lo >> 32), lane);
        lanes = KeepGreatest(lanes, ~static_cast<uint32_t>(best_path.lo), lane);
      }
      const int winner = __ffs(lanes) - 1;

      const double w = __shfl_sync(kFullWarp, best_key, winner);
      const RankPath ranks = {ShuffleWord(best_path.hi, winner), ShuffleWord(best_path.lo, winner)};
      const ItemTag popped = {__shfl_sync(kFullWarp, best_tag.packed, winner)};
      const int depth = popped.depth();
      const int rank = popped.rank();
      const float* row = s_log_probs + (depth - 1) * candidates;

      if (lane == 0) {
        s_tag[node] = popped;
        s_mass[node] = __double2float_rn(w);
      }

      // The sibling takes the popped item's slot; the child takes slot number `node`, which no item
      // had before. The last pop pushes nothing, so `budget` slots suffice.
      const bool has_sibling = rank + 1 < candidates && IsFinite(row[rank + 1]);
      double sibling = 0.0;
      if (has_sibling) {
        sibling = __dadd_rn(__dsub_rn(w, static_cast<double>(row[rank])),
                            static_cast<double>(row[rank + 1]));
      }
      const uint64_t sibling_order = has_sibling ? OrderedKey(sibling) : 0;
      const RankPath sibling_path = Advance(ranks, depth);
      const ItemTag sibling_tag = ItemTag::Make(popped.parent(), node, depth, rank + 1);

      const bool has_child = node < budget && depth < depths && IsFinite(row[candidates]);
      double child = 0.0;
      if (has_child) child = __dadd_rn(w, static_cast<double>(row[candidates]));
      const uint64_t child_order = OrderedKey(child);
      // A path has no digit below kMaxDepths, where there is no child either.
      const RankPath child_path = Advance(ranks, depth < kMaxDepths ? depth + 1 : depth);
      const ItemTag child_tag = ItemTag::Make(node, 0, depth + 1, 0);

      // Selects, not branches: a branch lets the compiler index the slots at run time, which moves
      // them to local memory.
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const bool is_sibling = lane == winner && slot == best_slot;
        const bool is_child = has_child && lane == (node & 31) && slot == (node >> 5);
        order[slot] = is_child ? child_order : is_sibling ? sibling_order : order[slot];
        key[slot] = is_child ? child : is_sibling ? sibling : key[slot];
        path[slot].hi = is_child ? child_path.hi : is_sibling ? sibling_path.hi : path[slot].hi;
        path[slot].lo = is_child ? child_path.lo : is_sibling ? sibling_path.lo : path[slot].lo;
        tag[slot].packed =
            is_child ? child_tag.packed : is_sibling ? sibling_tag.packed : tag[slot].packed;
      }
    }
    if (lane == 0) s_count = node;
  }
  __syncthreads();

  // Every link has one writer: the node that it leads to.
  const int count = s_count;
  for (int i = 1 + thread; i < count; i += kBuildTreeThreads) {
    const int elder = s_tag[i].elder();
    if (elder == 0) {
      s_next_token[s_tag[i].parent()] = i;
    } else {
      s_next_sibling[elder] = i;
    }
  }
  __syncthreads();

  const TreeView tree = trees.Row(request);
  const int64_t root_token = root[request];
  const int64_t prefix_len = prefix_lens[request];
  const float infinity = __int_as_float(0x7f800000);
  for (int i = thread; i < tree.nodes; i += kBuildTreeThreads) {
    const bool drafted = i > 0 && i < count;
    const ItemTag tag = drafted ? s_tag[i] : ItemTag{0};
    const int64_t cell =
        request * cells + static_cast<int64_t>(tag.depth() - 1) * candidates + tag.rank();
    tree.tokens[i] = drafted ? ids[cell] : root_token;
    tree.parents[i] = drafted ? tag.parent() : (i == 0 ? -1 : 0);
    tree.depths[i] = tag.depth();
    tree.log_mass[i] = drafted ? s_mass[i] : (i == 0 ? 0.0f : -infinity);
    tree.positions[i] = prefix_len + tag.depth();
    tree.next_token[i] = s_next_token[i];
    tree.next_sibling[i] = s_next_sibling[i];
    uint64_t ancestors[kMaxWords] = {i < 64 ? uint64_t{1} << i : 0,
                                     i < 64 ? 0 : uint64_t{1} << (i - 64)};
    for (int above = i; drafted && above != 0;) {
      above = s_tag[above].parent();
      ancestors[0] |= above < 64 ? uint64_t{1} << above : 0;
      ancestors[1] |= above < 64 ? 0 : uint64_t{1} << (above - 64);
    }
    int64_t* words = tree.ancestors + static_cast<int64_t>(i) * tree.words;
    words[0] = static_cast<int64_t>(ancestors[0]);
    if (tree.words > 1) words[1] = static_cast<int64_t>(ancestors[1]);
  }
  if (thread == 0) *tree.num_nodes = count;
}

/*!
 * \brief Builds every request's tree on `stream`.
 *
 * \param ids [requests, depths, candidates], on the device as every pointer here.
 * \param log_probs [requests, depths, candidates].
 * \param root [requests], prefix_lens [requests].
 * \param trees Every element of its arrays is written; nodes = budget + 1.
 */
inline cudaError_t LaunchBuildTree(const int64_t* ids, const float* log_probs, const int64_t* root,
                                   const int64_t* prefix_lens, int64_t requests, int depths,
                                   int candidates, int budget, const TreeView& trees,
                                   cudaStream_t stream) {
  if (requests == 0) return cudaSuccess;
  const auto kernel = budget <= 32   ? BuildTreeKernel<1>
                      : budget <= 64 ? BuildTreeKernel<2>
                                     : BuildTreeKernel<4>;
  const size_t shared = sizeof(float) * depths * candidates;
  kernel<<<static_cast<unsigned>(requests), kBuildTreeThreads, shared, stream>>>(
      ids, log_probs, root, prefix_lens, depths, candidates, budget, trees);
  return cudaGetLastError();
}

}  // namespace kdtree
