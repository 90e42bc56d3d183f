#include <ATen/Parallel.h>

#include "contracts.h"
#include "kdtree/compact_kv.h"
#include "ops.h"

namespace kdtree {

void CompactKvCpu(const at::Tensor& buffer_ptrs, const at::Tensor& row_bytes,
                  const at::Tensor& slots, const at::Tensor& path, const at::Tensor& accept_len) {
  const CompactSizes sizes = CheckCompactKv(buffer_ptrs, row_bytes, slots, path, accept_len);
  at::parallel_for(0, sizes.buffers * sizes.requests, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      CompactRows(sizes.view, i / sizes.requests, i % sizes.requests);
    }
  });
}

}  // namespace kdtree
