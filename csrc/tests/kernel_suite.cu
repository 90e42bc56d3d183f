// The kernel suite on the GPU.
//
//     nvcc -std=c++17 -O3 -fmad=false -gencode=arch=compute_90a,code=sm_90a -Icsrc/include
//         csrc/tests/kernel_suite.cu -o suite
//     ./suite build/suite/*.kdtr
//
// Exit status 77 says that there is no GPU.
#include "kernel_suite.h"

#include <cuda_runtime.h>

#include "kdtree/accept_tree.cuh"
#include "kdtree/build_tree.cuh"
#include "kdtree/compact_kv.cuh"
#include "kdtree/draft_topk.cuh"
#include "kdtree/gather_path.cuh"
#include "kdtree/tree_attention.cuh"
#include "kdtree/tree_mask.cuh"

namespace kdtree {
namespace suite {
namespace {

constexpr int kNoDevice = 77;

void Check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class CudaDevice {
 public:
  CudaDevice() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() { cudaStreamDestroy(stream_); }

  std::string name() const {
    cudaDeviceProp properties;
    Check(cudaGetDeviceProperties(&properties, 0));
    return properties.name;
  }

  void* Allocate(size_t bytes) {
    void* memory = nullptr;
    Check(cudaMalloc(&memory, bytes));
    return memory;
  }
  void Free(void* memory) { cudaFree(memory); }
  void Upload(void* to, const void* from, size_t bytes) {
    Check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  }
  void Download(void* to, const void* from, size_t bytes) {
    Check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
  }

  /*!
   * \brief Captures the calls in a CUDA graph and runs that.
   *
   * A call that waited for the device or copied through the host could not be captured; that
   * every call became a kernel of the graph, and nothing else did, is checked.
   */
  void Run(const std::function<void()>& calls) {
    Check(cudaDeviceSynchronize());
    launches_ = 0;
    cudaGraph_t graph = nullptr;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    try {
      calls();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      throw;
    }
    Check(cudaStreamEndCapture(stream_, &graph));

    size_t count = 0;
    Check(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    Check(cudaGraphGetNodes(graph, nodes.data(), &count));
    size_t kernels = 0;
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type;
      Check(cudaGraphNodeGetType(node, &type));
      kernels += type == cudaGraphNodeTypeKernel;
    }
    if (kernels != launches_ || count != launches_) {
      throw std::runtime_error(std::to_string(launches_) + " launches gave " +
                               std::to_string(kernels) + " kernels among " +
                               std::to_string(count) + " graph nodes");
    }

    cudaGraphExec_t executable = nullptr;
    Check(cudaGraphInstantiate(&executable, graph, 0));
    Check(cudaGraphLaunch(executable, stream_));
    Check(cudaStreamSynchronize(stream_));
    Check(cudaGraphExecDestroy(executable));
    Check(cudaGraphDestroy(graph));
  }

  void BuildTree(const int64_t* ids, const float* log_probs, const int64_t* root,
                 const int64_t* prefix_lens, int64_t requests, int depths, int candidates,
                 int budget, const TreeView& trees) {
    Count(LaunchBuildTree(ids, log_probs, root, prefix_lens, requests, depths, candidates, budget,
                          trees, stream_));
  }
  void AcceptTree(const AcceptView& view, int64_t requests) {
    Count(LaunchAcceptTree(view, requests, stream_));
  }
  template <typename T>
  void TreeAttention(const AttentionView<T>& view, int64_t requests) {
    Count(LaunchTreeAttention(view, requests, stream_));
  }
  template <typename T>
  void DraftTopk(const T* logits, int64_t rows, int64_t vocab, int k, int64_t vocab_start,
                 int64_t* ids, float* values, float* lse) {
    Count(LaunchDraftTopk(logits, rows, vocab, vocab, k, vocab_start, ids, values, lse, stream_));
  }
  void MergeTopk(const int64_t* ids, const float* values, const float* lse, int shards,
                 int64_t rows, int k, int k_out, int64_t* out_ids, float* out_values,
                 float* out_lse) {
    Count(LaunchMergeTopk(ids, values, lse, shards, rows, k, k_out, out_ids, out_values, out_lse,
                          stream_));
  }
  void TreeMask(const MaskView& view, int64_t requests) {
    Count(LaunchTreeMask(view, requests, stream_));
  }
  void GatherPath(const void* rows, const int32_t* path, int64_t requests, int64_t nodes,
                  int64_t steps, int64_t row_bytes, void* out) {
    Count(LaunchGatherPath(rows, path, requests, nodes, steps, row_bytes, out, stream_));
  }
  void CompactKv(const CompactView& view, int64_t buffers, int64_t requests) {
    Count(LaunchCompactKv(view, buffers, requests, stream_));
  }

 private:
  void Count(cudaError_t launched) {
    Check(launched);
    ++launches_;
  }

  cudaStream_t stream_ = nullptr;
  size_t launches_ = 0;
};

}  // namespace
}  // namespace suite
}  // namespace kdtree

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device: nothing was run\n");
    return kdtree::suite::kNoDevice;
  }
  kdtree::suite::CudaDevice device;
  return kdtree::suite::RunSuite(device, argc, argv);
}
