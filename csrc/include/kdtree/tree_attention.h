// Attention of a tree's queries to their ancestors, merged with the prefix pass, on the CPU.
//
// Cost of a query and head: 576 multiply-adds for the score of a row it sees and 512 for its value,
// and an exponential; rows it does not see cost a bit test.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kdtree/bfloat16.h"
#include "kdtree/tree.h"

namespace kdtree {

// A row of the latent cache: the values, then the rotary part that only keys have.
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kKeyDim = kLatentDim + kRopeDim;

/*!
 * \brief What sums run in: float32 is the path that is held against float64, so a float sum over
 * 576 products would already be too coarse for it.
 */
template <typename T>
struct AttentionSum;
template <>
struct AttentionSum<float> {
  using Type = double;
};
template <>
struct AttentionSum<BFloat16> {
  using Type = float;
};

/*!
 * \brief The pointers of tree_attention, row-major.
 *
 * \tparam T float or BFloat16.
 */
template <typename T>
struct AttentionView {
  const T* q;                // [bs, nodes, heads, kKeyDim]
  const T* k_tail;           // [bs, nodes, kKeyDim]
  const int64_t* ancestors;  // [bs, nodes, words]
  const T* prefix_out;       // [bs, nodes, heads, kLatentDim], not read where the prefix is empty
  const float* prefix_lse;   // [bs, heads, nodes] natural log; an infinity: empty prefix
  T* out;                    // [bs, nodes, heads, kLatentDim]
  double scale;
  int nodes;
  int words;
  int heads;
};

/*!
 * \brief Product of a query and a key. The partial sums are independent, so that a compiler may
 * keep them in one vector register.
 */
template <typename T>
inline typename AttentionSum<T>::Type DotKey(const T* q, const T* key) {
  using Sum = typename AttentionSum<T>::Type;
  constexpr int kPartialSums = 16;
  static_assert(kKeyDim % kPartialSums == 0, "a key is cut into whole pieces");
  Sum partial[kPartialSums] = {};
  for (int i = 0; i < kKeyDim; i += kPartialSums) {
    for (int j = 0; j < kPartialSums; ++j) {
      partial[j] += static_cast<Sum>(static_cast<float>(q[i + j])) *
                    static_cast<Sum>(static_cast<float>(key[i + j]));
    }
  }
  Sum sum = 0;
  for (int j = 0; j < kPartialSums; ++j) sum += partial[j];
  return sum;
}

/*!
 * \brief Attends one query and head, numbered (request * nodes + node) * heads + head.
 *
 * The prefix counts as one more row, of score prefix_lse and value prefix_out.
 */
template <typename T>
inline void TreeAttention(const AttentionView<T>& view, int64_t row) {
  using Sum = typename AttentionSum<T>::Type;
  const int64_t query = row / view.heads;
  const int64_t head = row % view.heads;
  const int64_t request = query / view.nodes;
  const int64_t node = query % view.nodes;
  const int64_t* words = view.ancestors + query * view.words;
  const T* q = view.q + row * kKeyDim;
  const T* keys = view.k_tail + request * view.nodes * kKeyDim;
  const T* prefix_out = view.prefix_out + row * kLatentDim;
  const float lse = view.prefix_lse[(request * view.heads + head) * view.nodes + node];
  const bool has_prefix = !std::isinf(lse);

  int seen[kMaxNodes];
  Sum scores[kMaxNodes];
  int count = 0;
  Sum greatest = has_prefix ? static_cast<Sum>(lse) : -std::numeric_limits<Sum>::infinity();
  for (int j = 0; j < view.nodes; ++j) {
    if ((static_cast<uint64_t>(words[j / 64]) >> (j % 64) & 1) == 0) continue;
    const Sum score = DotKey(q, keys + int64_t{j} * kKeyDim) * static_cast<Sum>(view.scale);
    seen[count] = j;
    scores[count++] = score;
    greatest = std::max(greatest, score);
  }

  Sum total = 0;
  Sum weighted[kLatentDim] = {};
  const auto add = [&](Sum score, const T* value) {
    const Sum weight = std::exp(score - greatest);
    total += weight;
    for (int i = 0; i < kLatentDim; ++i) {
      weighted[i] += weight * static_cast<Sum>(static_cast<float>(value[i]));
    }
  };
  for (int k = 0; k < count; ++k) add(scores[k], keys + int64_t{seen[k]} * kKeyDim);
  if (has_prefix) add(static_cast<Sum>(lse), prefix_out);

  const bool saw_nothing = count == 0 && !has_prefix;
  T* out = view.out + row * kLatentDim;
  for (int i = 0; i < kLatentDim; ++i) {
    out[i] = static_cast<T>(static_cast<float>(saw_nothing ? Sum{0} : weighted[i] / total));
  }
}

}  // namespace kdtree
