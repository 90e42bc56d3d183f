// What the CPU and the CUDA versions of the tree ops share: the limits, the packed rank path and
// the pointers of a batch of trees. Plain C++, no framework.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KDTREE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KDTREE_HOST_DEVICE inline
#endif

namespace kdtree {

// Fifteen digits of seven bits are what a RankPath holds; 128 nodes are what two mask words hold.
constexpr int kMaxDepths = 15;
constexpr int kMaxCandidates = 127;
constexpr int kMaxBudget = 127;
constexpr int kMaxNodes = kMaxBudget + 1;
constexpr int kMaxWords = (kMaxNodes + 63) / 64;

/*!
 * \brief The ranks chosen at depth 1, 2, ... packed most significant digit first.
 *
 * Digit d is rank + 1, and 0 past the end, so that comparing two paths as numbers compares
 * them lexicographically with a proper prefix first. Depths 1..9 are in hi, 10..15 in lo.
 */
struct RankPath {
  uint64_t hi;
  uint64_t lo;
};

KDTREE_HOST_DEVICE bool operator<(const RankPath& a, const RankPath& b) {
  return a.hi != b.hi ? a.hi < b.hi : a.lo < b.lo;
}

/*!
 * \brief Adds one to the digit at a depth: the next sibling when depth is the path's own, the first
 * child when it is one more.
 */
KDTREE_HOST_DEVICE RankPath Advance(RankPath path, int depth) {
  if (depth <= 9) {
    path.hi += uint64_t{1} << (7 * (9 - depth));
  } else {
    path.lo += uint64_t{1} << (7 * (15 - depth));
  }
  return path;
}

/*!
 * \brief Whether a value is neither NaN nor infinite, from its bits, so that no compiler option can
 * assume the answer.
 */
KDTREE_HOST_DEVICE bool IsFinite(float value) {
  union {
    float value;
    uint32_t bits;
  } pun = {value};
  return (pun.bits & 0x7f800000u) != 0x7f800000u;
}

/*!
 * \brief A batch of trees as build_tree writes it; every array is row-major, one row a request.
 */
struct TreeView {
  int64_t* tokens;        // [bs, nodes]
  int32_t* parents;       // [bs, nodes]
  int32_t* depths;        // [bs, nodes]
  float* log_mass;        // [bs, nodes]
  int64_t* positions;     // [bs, nodes]
  int64_t* ancestors;     // [bs, nodes, words]
  int32_t* next_token;    // [bs, nodes]
  int32_t* next_sibling;  // [bs, nodes]
  int32_t* num_nodes;     // [bs]
  int nodes;
  int words;

  KDTREE_HOST_DEVICE TreeView Row(int64_t request) const {
    const int64_t offset = request * nodes;
    return {tokens + offset,     parents + offset,   depths + offset,
            log_mass + offset,   positions + offset, ancestors + offset * words,
            next_token + offset, next_sibling + offset, num_nodes + request,
            nodes,               words};
  }
};

}  // namespace kdtree
