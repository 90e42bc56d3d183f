// The kernel suite on the CPU versions of the ops.
//
//     g++ -std=c++17 -O2 -ffp-contract=off -Icsrc/include csrc/tests/kernel_suite.cpp -o suite
//     ./suite build/suite/*.kdtr
#include "kernel_suite.h"

#include <cstdlib>
#include <new>

#include "kdtree/build_tree.h"
#include "kdtree/draft_topk.h"
#include "kdtree/gather_path.h"

namespace kdtree {
namespace suite {
namespace {

class CpuDevice {
 public:
  std::string name() const { return "the CPU"; }

  void* Allocate(size_t bytes) { return ::operator new(bytes); }
  void Free(void* memory) { ::operator delete(memory); }
  void Upload(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
  void Download(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
  void Run(const std::function<void()>& calls) { calls(); }

  void BuildTree(const int64_t* ids, const float* log_probs, const int64_t* root,
                 const int64_t* prefix_lens, int64_t requests, int depths, int candidates,
                 int budget, const TreeView& trees) {
    const int64_t cells = int64_t{depths} * candidates;
    for (int64_t request = 0; request < requests; ++request) {
      kdtree::BuildTree(ids + request * cells, log_probs + request * cells, root[request],
                        prefix_lens[request], depths, candidates, budget, trees.Row(request));
    }
  }

  void AcceptTree(const AcceptView& view, int64_t requests) {
    for (int64_t request = 0; request < requests; ++request) kdtree::AcceptTree(view, request);
  }

  template <typename T>
  void TreeAttention(const AttentionView<T>& view, int64_t requests) {
    const int64_t rows = requests * view.nodes * view.heads;
    for (int64_t row = 0; row < rows; ++row) kdtree::TreeAttention(view, row);
  }

  template <typename T>
  void DraftTopk(const T* logits, int64_t rows, int64_t vocab, int k, int64_t vocab_start,
                 int64_t* ids, float* values, float* lse) {
    for (int64_t row = 0; row < rows; ++row) {
      kdtree::DraftTopk(logits + row * vocab, vocab, k, vocab_start, ids + row * k,
                        values + row * k, lse + row);
    }
  }

  void MergeTopk(const int64_t* ids, const float* values, const float* lse, int shards,
                 int64_t rows, int k, int k_out, int64_t* out_ids, float* out_values,
                 float* out_lse) {
    for (int64_t row = 0; row < rows; ++row) {
      kdtree::MergeTopk(ids, values, shards, rows, k, row, k_out, out_ids + row * k_out,
                        out_values + row * k_out);
      out_lse[row] = MergeLse(lse + row, shards, rows);
    }
  }

  void TreeMask(const MaskView& view, int64_t requests) {
    for (int64_t request = 0; request < requests; ++request) {
      for (int node = 0; node < view.nodes; ++node) FillMaskRow(view, request, node, 0, 1);
    }
  }

  void GatherPath(const void* rows, const int32_t* path, int64_t requests, int64_t nodes,
                  int64_t steps, int64_t row_bytes, void* out) {
    for (int64_t request = 0; request < requests; ++request) {
      kdtree::GatherPath(static_cast<const char*>(rows) + request * nodes * row_bytes,
                         path + request * steps, nodes, steps, row_bytes,
                         static_cast<char*>(out) + request * steps * row_bytes);
    }
  }

  void CompactKv(const CompactView& view, int64_t buffers, int64_t requests) {
    for (int64_t buffer = 0; buffer < buffers; ++buffer) {
      for (int64_t request = 0; request < requests; ++request) {
        CompactRows(view, buffer, request);
      }
    }
  }
};

}  // namespace
}  // namespace suite
}  // namespace kdtree

int main(int argc, char** argv) {
  kdtree::suite::CpuDevice device;
  return kdtree::suite::RunSuite(device, argc, argv);
}
