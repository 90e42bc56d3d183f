// The k greatest logits of a row with their log-sum-exp, and the join of several such lists, on the
// CPU. The order is by value, greatest first, then by smaller id; NaN counts as -inf.
//
// Cost of DraftTopk: two reads of the row and V exponentials; the heap of k entries is touched
// only by elements above its smallest. Cost of MergeTopk: a partial sort of shards * k entries.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace kdtree {

struct TopkEntry {
  float value;
  int64_t id;
  // "Comes before" in the result's order.
  bool operator<(const TopkEntry& other) const {
    return value != other.value ? value > other.value : id < other.id;
  }
};

inline float NanToMinusInfinity(float value) {
  return std::isnan(value) ? -std::numeric_limits<float>::infinity() : value;
}

/*!
 * \brief Top-k and log-sum-exp of one row.
 *
 * \param logits [vocab], any type that converts to float.
 * \param vocab_start Added to every id.
 */
template <typename T>
void DraftTopk(const T* logits, int64_t vocab, int64_t k, int64_t vocab_start, int64_t* ids,
               float* values, float* lse) {
  std::vector<TopkEntry> kept;
  kept.reserve(static_cast<size_t>(k));
  float greatest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < vocab; ++i) {
    const TopkEntry entry = {NanToMinusInfinity(static_cast<float>(logits[i])), i};
    if (static_cast<int64_t>(kept.size()) < k) {
      kept.push_back(entry);
      std::push_heap(kept.begin(), kept.end());
    } else if (entry < kept.front()) {
      std::pop_heap(kept.begin(), kept.end());
      kept.back() = entry;
      std::push_heap(kept.begin(), kept.end());
    }
    greatest = std::max(greatest, entry.value);
  }
  std::sort_heap(kept.begin(), kept.end());
  for (int64_t j = 0; j < k; ++j) {
    ids[j] = kept[static_cast<size_t>(j)].id + vocab_start;
    values[j] = kept[static_cast<size_t>(j)].value;
  }

  if (std::isinf(greatest)) {
    *lse = greatest;
    return;
  }
  double sum = 0.0;
  for (int64_t i = 0; i < vocab; ++i) {
    const float value = NanToMinusInfinity(static_cast<float>(logits[i]));
    sum += static_cast<double>(std::exp(value - greatest));
  }
  *lse = static_cast<float>(static_cast<double>(greatest) + std::log(sum));
}

/*!
 * \brief log(sum(exp(lse))) of `shards` numbers, `stride` apart; exact for one shard.
 */
inline float MergeLse(const float* lse, int64_t shards, int64_t stride) {
  float greatest = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < shards; ++t) {
    greatest = std::max(greatest, NanToMinusInfinity(lse[t * stride]));
  }
  if (std::isinf(greatest)) return greatest;
  double sum = 0.0;
  for (int64_t t = 0; t < shards; ++t) {
    sum += std::exp(static_cast<double>(NanToMinusInfinity(lse[t * stride])) - greatest);
  }
  return static_cast<float>(static_cast<double>(greatest) + std::log(sum));
}

/*!
 * \brief Joins row `row` of `shards` lists of k entries; equal (value, id) pairs keep shard order.
 *
 * \param ids [shards, rows, k], values [shards, rows, k].
 */
inline void MergeTopk(const int64_t* ids, const float* values, int64_t shards, int64_t rows,
                      int64_t k, int64_t row, int64_t k_out, int64_t* out_ids, float* out_values) {
  std::vector<TopkEntry> entries;
  entries.reserve(static_cast<size_t>(shards * k));
  for (int64_t t = 0; t < shards; ++t) {
    const int64_t offset = (t * rows + row) * k;
    for (int64_t j = 0; j < k; ++j) {
      entries.push_back({NanToMinusInfinity(values[offset + j]), ids[offset + j]});
    }
  }
  std::stable_sort(entries.begin(), entries.end());
  for (int64_t j = 0; j < k_out; ++j) {
    out_ids[j] = entries[static_cast<size_t>(j)].id;
    out_values[j] = entries[static_cast<size_t>(j)].value;
  }
}

}  // namespace kdtree
