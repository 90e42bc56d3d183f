// Gathers the accepted path's rows of one request on the CPU. Cost: one copy of `steps` rows.
#pragma once

#include <cstdint>
#include <cstring>

namespace kdtree {

/*!
 * \brief Copies row path[j] of the request's `nodes` rows to out[j]; a node outside [0, nodes)
 * gives zeros.
 */
inline void GatherPath(const char* rows, const int32_t* path, int64_t nodes, int64_t steps,
                       int64_t row_bytes, char* out) {
  for (int64_t j = 0; j < steps; ++j) {
    const int64_t node = path[j];
    if (node >= 0 && node < nodes) {
      std::memcpy(out + j * row_bytes, rows + node * row_bytes, static_cast<size_t>(row_bytes));
    } else {
      std::memset(out + j * row_bytes, 0, static_cast<size_t>(row_bytes));
    }
  }
}

}  // namespace kdtree
