// Fills one row of a flat attention mask; the CPU and the CUDA version share the layout.
// Cost: one byte written a cell, prefix cells only on demand.
#pragma once

#include "kdtree/tree.h"

namespace kdtree {

/*!
 * \brief The pointers of tree_mask. Request b's block starts at indptr[b] and is row-major
 * [nodes, prefix_lens[b] + nodes].
 */
struct MaskView {
  const int64_t* ancestors;    // [bs, nodes, words]
  const int64_t* prefix_lens;  // [bs]
  const int64_t* indptr;       // [bs + 1]
  uint8_t* mask;               // [size]
  int64_t size;
  int nodes;
  int words;
  bool write_prefix;
};

// Longer than any mask. Prefix lengths are cut to it, and starts to where no row meets a mask, so
// that no sum of cells overflows whatever the arguments hold.
constexpr int64_t kMaxMaskPrefix = int64_t{1} << 48;
constexpr int64_t kMaxMaskStart = int64_t{1} << 60;

KDTREE_HOST_DEVICE int64_t Clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

/*!
 * \brief The range of mask cells one row covers, and the cell of its first tree column.
 */
struct MaskRow {
  int64_t begin;  // first cell of the row
  int64_t tree;   // first cell after the prefix
};

KDTREE_HOST_DEVICE MaskRow MaskRowOf(const MaskView& view, int64_t request, int node) {
  const int64_t prefix = Clamp(view.prefix_lens[request], 0, kMaxMaskPrefix);
  const int64_t start = Clamp(view.indptr[request], -kMaxMaskStart, kMaxMaskStart);
  const int64_t begin = start + node * (prefix + view.nodes);
  return {begin, begin + prefix};
}

/*!
 * \brief Writes what `worker` of `workers` owns of a row; cells outside [0, size) are dropped.
 */
KDTREE_HOST_DEVICE void FillMaskRow(const MaskView& view, int64_t request, int node, int worker,
                                    int workers) {
  const MaskRow row = MaskRowOf(view, request, node);
  const int64_t* words = view.ancestors + (request * view.nodes + node) * view.words;
  if (view.write_prefix) {
    const int64_t first = row.begin > 0 ? row.begin : 0;
    const int64_t last = row.tree < view.size ? row.tree : view.size;
    for (int64_t cell = first + worker; cell < last; cell += workers) view.mask[cell] = 1;
  }
  for (int j = worker; j < view.nodes; j += workers) {
    const int64_t cell = row.tree + j;
    if (cell >= 0 && cell < view.size) {
      view.mask[cell] = static_cast<uint64_t>(words[j / 64]) >> (j % 64) & 1;
    }
  }
}

}  // namespace kdtree
