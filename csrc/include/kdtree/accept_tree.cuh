// The walk that accepts draft paths on the GPU, one block a request.
//
// The walk is a chain of dependent reads, so a row's links are first brought to shared memory by
// all threads (about 24 bytes a node, coalesced); one thread then walks at shared-memory latency
// and all threads write the results.
#pragma once

#include <cuda_runtime.h>

#include "kdtree/accept_tree.h"

namespace kdtree {

constexpr int kAcceptTreeThreads = 128;

/*!
 * \brief Accepts request blockIdx.x; view.nodes <= kMaxNodes and view.max_depth < kMaxNodes.
 */
static __global__ void __launch_bounds__(kAcceptTreeThreads) AcceptTreeKernel(AcceptView view) {
  __shared__ int64_t s_tokens[kMaxNodes];
  __shared__ int64_t s_predictions[kMaxNodes];
  __shared__ int32_t s_next_token[kMaxNodes];
  __shared__ int32_t s_next_sibling[kMaxNodes];
  __shared__ int32_t s_path[kMaxNodes];
  __shared__ int s_length;

  const int64_t request = blockIdx.x;
  const int64_t row = request * view.nodes;
  for (int i = threadIdx.x; i < view.nodes; i += kAcceptTreeThreads) {
    s_tokens[i] = view.tokens[row + i];
    s_predictions[i] = view.predictions[row + i];
    s_next_token[i] = view.next_token[row + i];
    s_next_sibling[i] = view.next_sibling[row + i];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    s_length = WalkTree(s_tokens, s_next_token, s_next_sibling, s_predictions,
                        view.num_nodes[request], view.nodes, view.max_depth, s_path);
  }
  __syncthreads();

  const int length = s_length;
  const int64_t bonus = s_predictions[s_path[length]];
  const int64_t out = request * (view.max_depth + 1);
  for (int j = threadIdx.x; j <= view.max_depth; j += kAcceptTreeThreads) {
    view.path[out + j] = j <= length ? s_path[j] : -1;
    view.out_tokens[out + j] = j < length ? s_tokens[s_path[j + 1]] : (j == length ? bonus : 0);
  }
  if (threadIdx.x == 0) {
    view.accept_len[request] = length;
    view.bonus[request] = bonus;
    view.new_seq_lens[request] = view.prefix_lens[request] + length + 1;
  }
}

/*!
 * \brief Accepts every request on `stream`.
 */
inline cudaError_t LaunchAcceptTree(const AcceptView& view, int64_t requests, cudaStream_t stream) {
  if (requests == 0) return cudaSuccess;
  AcceptTreeKernel<<<static_cast<unsigned>(requests), kAcceptTreeThreads, 0, stream>>>(view);
  return cudaGetLastError();
}

}  // namespace kdtree
