// Moves the accepted path's KV rows to the front of the request's slots, on the CPU.
//
// Cost: one read and one write of accept_len rows a buffer; a row that stays where it is costs
// nothing.
#pragma once

#include <cstdint>
#include <cstring>

#include "kdtree/tree.h"

namespace kdtree {

/*!
 * \brief The pointers of compact_kv.
 */
struct CompactView {
  const int64_t* buffer_ptrs;  // [buffers] addresses of row 0
  const int64_t* row_bytes;    // [buffers]
  const int64_t* slots;        // [bs, nodes] row numbers of a request's verified nodes
  const int32_t* path;         // [bs, path_stride] node numbers
  const int32_t* accept_len;   // [bs]
  int nodes;
  int path_stride;
};

/*!
 * \brief The source and target row of one move; source is -1 when there is nothing to move.
 */
struct RowMove {
  int64_t source;
  int64_t target;
};

/*!
 * \brief Move j of a request (j >= 1). A path entry outside [1, nodes) or a negative slot moves
 * nothing, so that a malformed path cannot reach memory outside the named rows.
 */
KDTREE_HOST_DEVICE RowMove MoveOf(const CompactView& view, int64_t request, int j) {
  const int64_t* slots = view.slots + request * view.nodes;
  const int node = view.path[request * view.path_stride + j];
  if (node < 1 || node >= view.nodes || node == j) return {-1, 0};
  const RowMove move = {slots[node], slots[j]};
  return move.source < 0 || move.target < 0 || move.source == move.target ? RowMove{-1, 0} : move;
}

/*!
 * \brief The number of moves of a request: accept_len, within what path and slots can hold.
 */
KDTREE_HOST_DEVICE int MovesOf(const CompactView& view, int64_t request) {
  int moves = view.accept_len[request];
  if (moves > view.path_stride - 1) moves = view.path_stride - 1;
  if (moves > view.nodes - 1) moves = view.nodes - 1;
  return moves;
}

/*!
 * \brief Compacts one request in one buffer. In place: path[j] >= j and ascends, so no row is read
 * after it was written when j ascends.
 */
inline void CompactRows(const CompactView& view, int64_t buffer, int64_t request) {
  char* base = reinterpret_cast<char*>(static_cast<uintptr_t>(view.buffer_ptrs[buffer]));
  const int64_t row_bytes = view.row_bytes[buffer];
  if (row_bytes <= 0) return;
  const int moves = MovesOf(view, request);
  for (int j = 1; j <= moves; ++j) {
    const RowMove move = MoveOf(view, request, j);
    if (move.source < 0) continue;
    std::memcpy(base + move.target * row_bytes, base + move.source * row_bytes,
                static_cast<size_t>(row_bytes));
  }
}

}  // namespace kdtree
