// The walk that accepts a draft path, for one request; the CPU and the CUDA version share it.
//
// Cost: at most max_depth steps, each over one list of brothers; node and brother numbers only
// grow, so the whole walk reads at most `nodes` links whatever the links hold.
#pragma once

#include "kdtree/tree.h"

namespace kdtree {

/*!
 * \brief Follows the target's tokens from the root.
 *
 * A link outside [1, num_nodes), a child not above its parent or a brother not above the elder ends
 * the list it is in: wrong links shorten the path, they never loop or read outside the row.
 *
 * \param predictions [nodes] the target's token after each node.
 * \param path [max_depth + 1] written up to and including the returned length.
 * \return The number of accepted drafts.
 */
KDTREE_HOST_DEVICE int WalkTree(const int64_t* tokens, const int32_t* next_token,
                                const int32_t* next_sibling, const int64_t* predictions,
                                int num_nodes, int nodes, int max_depth, int32_t* path) {
  const int end = num_nodes < nodes ? num_nodes : nodes;
  int node = 0;
  int length = 0;
  path[0] = 0;
  while (length < max_depth) {
    const int64_t wanted = predictions[node];
    int above = node;
    int child = next_token[node];
    int found = -1;
    while (child > above && child < end) {
      if (tokens[child] == wanted) {
        found = child;
        break;
      }
      above = child;
      child = next_sibling[child];
    }
    if (found < 0) break;
    node = found;
    path[++length] = found;
  }
  return length;
}

/*!
 * \brief The pointers of accept_tree, row-major, one row a request.
 */
struct AcceptView {
  const int64_t* tokens;        // [bs, nodes]
  const int32_t* next_token;    // [bs, nodes]
  const int32_t* next_sibling;  // [bs, nodes]
  const int32_t* num_nodes;     // [bs]
  const int64_t* predictions;   // [bs, nodes]
  const int64_t* prefix_lens;   // [bs]
  int32_t* path;                // [bs, max_depth + 1]
  int32_t* accept_len;          // [bs]
  int64_t* bonus;               // [bs]
  int64_t* out_tokens;          // [bs, max_depth + 1]
  int64_t* new_seq_lens;        // [bs]
  int nodes;
  int max_depth;
};

/*!
 * \brief Accepts request `request` on the CPU.
 */
inline void AcceptTree(const AcceptView& view, int64_t request) {
  const int64_t row = request * view.nodes;
  const int64_t out = request * (view.max_depth + 1);
  int32_t* path = view.path + out;
  int64_t* out_tokens = view.out_tokens + out;
  const int length = WalkTree(view.tokens + row, view.next_token + row, view.next_sibling + row,
                              view.predictions + row, view.num_nodes[request], view.nodes,
                              view.max_depth, path);
  const int64_t bonus = view.predictions[row + path[length]];
  for (int j = 0; j <= view.max_depth; ++j) {
    if (j > length) path[j] = -1;
    out_tokens[j] = j < length ? view.tokens[row + path[j + 1]] : (j == length ? bonus : 0);
  }
  view.accept_len[request] = length;
  view.bonus[request] = bonus;
  view.new_seq_lens[request] = view.prefix_lens[request] + length + 1;
}

}  // namespace kdtree
