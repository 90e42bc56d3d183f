// Best-first draft tree of one request on the CPU.
//
// Cost: `budget` pops and at most 2 * budget pushes on a binary heap of at most budget + 1 items of
// 40 bytes, all on the stack.
#pragma once

#include <algorithm>
#include <limits>

#include "kdtree/tree.h"

namespace kdtree {

/*!
 * \brief A node that may enter the tree: its parent and its elder brother already have.
 */
struct FrontierItem {
  double key;
  RankPath path;
  int parent;
  int elder;  // node of rank - 1 under the same parent; the root (0) means none
  int depth;
  int rank;

  // std::*_heap keeps the greatest item first. Paths differ, so the order is total and the pop
  // order does not depend on how the heap is laid out.
  bool operator<(const FrontierItem& other) const {
    return key != other.key ? key < other.key : other.path < path;
  }
};

/*!
 * \brief Builds one request's tree.
 *
 * The sums keep the published order, (w - lp[d, r]) + lp[d, r + 1] and w + lp[d + 1, 0], in double:
 * another order or a fused multiply-add would break near-ties differently from the reference.
 *
 * \param ids [depths, candidates] token ids.
 * \param log_probs [depths, candidates]; what is not finite never enters.
 * \param tree Row of the request; every element of it is written.
 */
inline void BuildTree(const int64_t* ids, const float* log_probs, int64_t root, int64_t prefix_len,
                      int depths, int candidates, int budget, const TreeView& tree) {
  const int nodes = tree.nodes;
  const int words = tree.words;
  FrontierItem frontier[kMaxNodes + 1];
  int live = 0;

  for (int i = 0; i < nodes; ++i) {
    tree.tokens[i] = root;
    tree.parents[i] = i == 0 ? -1 : 0;
    tree.depths[i] = 0;
    tree.log_mass[i] = i == 0 ? 0.0f : -std::numeric_limits<float>::infinity();
    tree.positions[i] = prefix_len;
    tree.next_token[i] = -1;
    tree.next_sibling[i] = -1;
    for (int word = 0; word < words; ++word) {
      tree.ancestors[i * words + word] =
          word == i / 64 ? static_cast<int64_t>(uint64_t{1} << (i % 64)) : 0;
    }
  }

  const auto push = [&](const FrontierItem& item) {
    frontier[live++] = item;
    std::push_heap(frontier, frontier + live);
  };
  if (IsFinite(log_probs[0])) {
    push({static_cast<double>(log_probs[0]), Advance({0, 0}, 1), 0, 0, 1, 0});
  }

  int node = 1;
  for (; node <= budget && live > 0; ++node) {
    std::pop_heap(frontier, frontier + live);
    const FrontierItem item = frontier[--live];
    const float* row = log_probs + static_cast<int64_t>(item.depth - 1) * candidates;

    tree.tokens[node] = ids[static_cast<int64_t>(item.depth - 1) * candidates + item.rank];
    tree.parents[node] = item.parent;
    tree.depths[node] = item.depth;
    tree.log_mass[node] = static_cast<float>(item.key);
    tree.positions[node] = prefix_len + item.depth;
    for (int word = 0; word < words; ++word) {
      tree.ancestors[node * words + word] |= tree.ancestors[item.parent * words + word];
    }
    if (item.elder == 0) {
      tree.next_token[item.parent] = node;
    } else {
      tree.next_sibling[item.elder] = node;
    }

    if (item.rank + 1 < candidates && IsFinite(row[item.rank + 1])) {
      const double without = item.key - static_cast<double>(row[item.rank]);
      push({without + static_cast<double>(row[item.rank + 1]), Advance(item.path, item.depth),
            item.parent, node, item.depth, item.rank + 1});
    }
    if (item.depth < depths && IsFinite(row[candidates])) {
      push({item.key + static_cast<double>(row[candidates]), Advance(item.path, item.depth + 1),
            node, 0, item.depth + 1, 0});
    }
  }
  *tree.num_nodes = node;
}

}  // namespace kdtree
