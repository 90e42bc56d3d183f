#include "contracts.h"

#include <cmath>
#include <limits>
#include <string>

namespace kdtree {
namespace {

std::string Text(const char* text) { return text; }
std::string Text(int64_t number) { return std::to_string(number); }
std::string Text(at::ScalarType type) { return c10::toString(type); }
std::string Text(const at::Device& device) { return device.str(); }
std::string Text(at::IntArrayRef numbers) {
  std::string text = "[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  }
  return text + "]";
}

// TORCH_CHECK with a message that is put together without a C++ stream: with a libstdc++ other than
// the one torch was built with, streaming a number ended the process (torch 2.11, GCC 13).
template <typename... Parts>
void Require(bool holds, const Parts&... parts) {
  if (!holds) TORCH_CHECK(false, (std::string("kdtree: ") + ... + Text(parts)));
}

// Checks everything a kernel takes for granted about one argument.
void Check(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef shape,
           const at::Tensor& beside, const char* beside_name) {
  Require(tensor.scalar_type() == dtype, "`", name, "` must be ", dtype, ", got ",
          tensor.scalar_type());
  Require(tensor.sizes() == shape, "`", name, "` must have shape ", shape, ", got ",
          tensor.sizes());
  Require(tensor.device() == beside.device(), "`", name, "` is on ", tensor.device(), " but `",
          beside_name, "` on ", beside.device());
  Require(tensor.is_contiguous(), "`", name, "` must be contiguous, got strides ",
          tensor.strides());
}

void CheckDim(const at::Tensor& tensor, const char* name, int64_t dim, const char* layout) {
  Require(tensor.dim() == dim, "`", name, "` must be ", layout, ", got shape ", tensor.sizes());
}

// Kernels that move 16 bytes at a time; a slice at a row's start keeps the alignment.
void CheckAlignment(const at::Tensor& tensor, const char* name) {
  const uint64_t past = reinterpret_cast<uint64_t>(tensor.const_data_ptr()) % 16;
  Require(past == 0, "`", name, "` must start at a multiple of 16 bytes, got one ",
          static_cast<int64_t>(past), " bytes past it; clone it");
}

void CheckRange(int64_t value, const char* name, int64_t low, int64_t high) {
  Require(value >= low && value <= high, "`", name, "` must be in ", low, "..", high, ", got ",
          value);
}

bool IsLogitType(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void CheckLogitType(const at::Tensor& tensor, const char* name) {
  Require(IsLogitType(tensor.scalar_type()), "`", name,
              "` must be float32, bfloat16 or float16, got ", tensor.scalar_type());
}

}  // namespace

TopkSizes CheckDraftTopk(const at::Tensor& logits, int64_t k, int64_t vocab_start,
                         const at::Tensor& ids, const at::Tensor& values, const at::Tensor& lse) {
  CheckDim(logits, "logits", 2, "[R, V]");
  CheckLogitType(logits, "logits");
  const int64_t rows = logits.size(0);
  const int64_t vocab = logits.size(1);
  Require(vocab <= std::numeric_limits<int32_t>::max(),
              "`logits` has too wide a row: ", vocab);
  Require(k >= 1 && k <= vocab, "`k` must be in 1..V = ", vocab, ", got ", k);
  CheckRange(k, "k", 1, kMaxCandidates);
  Require(vocab_start >= 0, "`vocab_start` must not be negative, got ", vocab_start);
  Require(vocab <= 1 || logits.stride(1) == 1,
              "`logits` must have contiguous rows, got strides ", logits.strides());
  Require(rows <= 1 || logits.stride(0) >= vocab,
              "`logits` rows must not overlap, got strides ", logits.strides());
  Check(ids, "ids", at::kLong, {rows, k}, logits, "logits");
  Check(values, "values", at::kFloat, {rows, k}, logits, "logits");
  Check(lse, "lse", at::kFloat, {rows}, logits, "logits");
  return {rows, vocab, logits.stride(0)};
}

MergeSizes CheckMergeTopk(const at::Tensor& ids, const at::Tensor& values, const at::Tensor& lse,
                          int64_t k_out, const at::Tensor& out_ids, const at::Tensor& out_values,
                          const at::Tensor& out_lse) {
  CheckDim(ids, "ids", 3, "[T, R, k]");
  const int64_t shards = ids.size(0);
  const int64_t rows = ids.size(1);
  const int64_t k = ids.size(2);
  Check(ids, "ids", at::kLong, {shards, rows, k}, values, "values");
  Check(values, "values", at::kFloat, {shards, rows, k}, ids, "ids");
  Check(lse, "lse", at::kFloat, {shards, rows}, ids, "ids");
  Require(shards >= 1, "`ids` must hold at least one shard");
  // Ranking compares every pair of a row.
  Require(shards * k <= 4096, "`ids` holds too many entries a row: ", shards * k);
  Require(k_out >= 1 && k_out <= shards * k, "`k_out` must be in 1..T * k = ",
              shards * k, ", got ", k_out);
  Check(out_ids, "out_ids", at::kLong, {rows, k_out}, ids, "ids");
  Check(out_values, "out_values", at::kFloat, {rows, k_out}, ids, "ids");
  Check(out_lse, "out_lse", at::kFloat, {rows}, ids, "ids");
  return {shards, rows, k};
}

BuildSizes CheckBuildTree(const at::Tensor& ids, const at::Tensor& log_probs,
                          const at::Tensor& root, const at::Tensor& prefix_lens, int64_t budget,
                          const at::Tensor& tokens, const at::Tensor& parents,
                          const at::Tensor& depths, const at::Tensor& log_mass,
                          const at::Tensor& positions, const at::Tensor& ancestors,
                          const at::Tensor& next_token, const at::Tensor& next_sibling,
                          const at::Tensor& num_nodes) {
  CheckDim(ids, "ids", 3, "[bs, L, K]");
  const int64_t requests = ids.size(0);
  const int64_t levels = ids.size(1);
  const int64_t candidates = ids.size(2);
  CheckRange(levels, "ids.shape[1] (L)", 1, kMaxDepths);
  CheckRange(candidates, "ids.shape[2] (K)", 1, kMaxCandidates);
  CheckRange(budget, "budget", 1, kMaxBudget);
  const int64_t nodes = budget + 1;
  const int64_t words = (nodes + 63) / 64;
  Check(ids, "ids", at::kLong, {requests, levels, candidates}, log_probs, "log_probs");
  Check(log_probs, "log_probs", at::kFloat, {requests, levels, candidates}, ids, "ids");
  Check(root, "root", at::kLong, {requests}, ids, "ids");
  Check(prefix_lens, "prefix_lens", at::kLong, {requests}, ids, "ids");
  Check(tokens, "tokens", at::kLong, {requests, nodes}, ids, "ids");
  Check(parents, "parents", at::kInt, {requests, nodes}, ids, "ids");
  Check(depths, "depths", at::kInt, {requests, nodes}, ids, "ids");
  Check(log_mass, "log_mass", at::kFloat, {requests, nodes}, ids, "ids");
  Check(positions, "positions", at::kLong, {requests, nodes}, ids, "ids");
  Check(ancestors, "ancestors", at::kLong, {requests, nodes, words}, ids, "ids");
  Check(next_token, "next_token", at::kInt, {requests, nodes}, ids, "ids");
  Check(next_sibling, "next_sibling", at::kInt, {requests, nodes}, ids, "ids");
  Check(num_nodes, "num_nodes", at::kInt, {requests}, ids, "ids");
  return {requests,
          static_cast<int>(levels),
          static_cast<int>(candidates),
          static_cast<int>(budget),
          {tokens.data_ptr<int64_t>(), parents.data_ptr<int32_t>(), depths.data_ptr<int32_t>(),
           log_mass.data_ptr<float>(), positions.data_ptr<int64_t>(),
           ancestors.data_ptr<int64_t>(), next_token.data_ptr<int32_t>(),
           next_sibling.data_ptr<int32_t>(), num_nodes.data_ptr<int32_t>(),
           static_cast<int>(nodes), static_cast<int>(words)}};
}

AcceptSizes CheckAcceptTree(const at::Tensor& tokens, const at::Tensor& next_token,
                            const at::Tensor& next_sibling, const at::Tensor& num_nodes,
                            const at::Tensor& predictions, const at::Tensor& prefix_lens,
                            int64_t max_depth, const at::Tensor& path,
                            const at::Tensor& accept_len, const at::Tensor& bonus,
                            const at::Tensor& out_tokens, const at::Tensor& new_seq_lens) {
  CheckDim(tokens, "tokens", 2, "[bs, N]");
  const int64_t requests = tokens.size(0);
  const int64_t nodes = tokens.size(1);
  CheckRange(nodes, "tokens.shape[1] (N)", 1, kMaxNodes);
  CheckRange(max_depth, "max_depth", 0, kMaxBudget);
  Check(tokens, "tokens", at::kLong, {requests, nodes}, predictions, "predictions");
  Check(next_token, "next_token", at::kInt, {requests, nodes}, tokens, "tokens");
  Check(next_sibling, "next_sibling", at::kInt, {requests, nodes}, tokens, "tokens");
  Check(num_nodes, "num_nodes", at::kInt, {requests}, tokens, "tokens");
  Check(predictions, "predictions", at::kLong, {requests, nodes}, tokens, "tokens");
  Check(prefix_lens, "prefix_lens", at::kLong, {requests}, tokens, "tokens");
  Check(path, "path", at::kInt, {requests, max_depth + 1}, tokens, "tokens");
  Check(accept_len, "accept_len", at::kInt, {requests}, tokens, "tokens");
  Check(bonus, "bonus", at::kLong, {requests}, tokens, "tokens");
  Check(out_tokens, "out_tokens", at::kLong, {requests, max_depth + 1}, tokens, "tokens");
  Check(new_seq_lens, "new_seq_lens", at::kLong, {requests}, tokens, "tokens");
  return {requests,
          {tokens.const_data_ptr<int64_t>(), next_token.const_data_ptr<int32_t>(),
           next_sibling.const_data_ptr<int32_t>(), num_nodes.const_data_ptr<int32_t>(),
           predictions.const_data_ptr<int64_t>(), prefix_lens.const_data_ptr<int64_t>(),
           path.data_ptr<int32_t>(), accept_len.data_ptr<int32_t>(), bonus.data_ptr<int64_t>(),
           out_tokens.data_ptr<int64_t>(), new_seq_lens.data_ptr<int64_t>(),
           static_cast<int>(nodes), static_cast<int>(max_depth)}};
}

CompactSizes CheckCompactKv(const at::Tensor& buffer_ptrs, const at::Tensor& row_bytes,
                            const at::Tensor& slots, const at::Tensor& path,
                            const at::Tensor& accept_len) {
  CheckDim(buffer_ptrs, "buffer_ptrs", 1, "[n_buf]");
  CheckDim(slots, "slots", 2, "[bs, N]");
  CheckDim(path, "path", 2, "[bs, S]");
  const int64_t buffers = buffer_ptrs.size(0);
  const int64_t requests = slots.size(0);
  const int64_t nodes = slots.size(1);
  const int64_t steps = path.size(1);
  // SGLang's pools keep addresses as uint64; the bits are the same.
  const at::ScalarType address_type = buffer_ptrs.scalar_type();
  Require(address_type == at::kLong || address_type == at::kUInt64,
              "`buffer_ptrs` must be int64 or uint64, got ", address_type);
  CheckRange(nodes, "slots.shape[1] (N)", 1, kMaxNodes);
  CheckRange(steps, "path.shape[1] (S)", 1, kMaxNodes);
  CheckRange(requests, "slots.shape[0] (bs)", 0, 65535);
  Check(buffer_ptrs, "buffer_ptrs", address_type, {buffers}, slots, "slots");
  Check(row_bytes, "row_bytes", at::kLong, {buffers}, slots, "slots");
  Check(slots, "slots", at::kLong, {requests, nodes}, path, "path");
  Check(path, "path", at::kInt, {requests, steps}, slots, "slots");
  Check(accept_len, "accept_len", at::kInt, {requests}, slots, "slots");
  return {buffers,
          requests,
          {static_cast<const int64_t*>(buffer_ptrs.const_data_ptr()),
           row_bytes.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(),
           path.const_data_ptr<int32_t>(), accept_len.const_data_ptr<int32_t>(),
           static_cast<int>(nodes), static_cast<int>(steps)}};
}

GatherSizes CheckGatherPath(const at::Tensor& rows, const at::Tensor& path, int64_t nodes,
                            const at::Tensor& out) {
  CheckDim(rows, "rows", 2, "[bs * N, C]");
  CheckDim(path, "path", 2, "[bs, S]");
  CheckLogitType(rows, "rows");
  const int64_t requests = path.size(0);
  const int64_t steps = path.size(1);
  const int64_t width = rows.size(1);
  CheckRange(nodes, "num_nodes_per_request", 1, kMaxNodes);
  Check(rows, "rows", rows.scalar_type(), {requests * nodes, width}, path, "path");
  Check(path, "path", at::kInt, {requests, steps}, rows, "rows");
  Check(out, "out", rows.scalar_type(), {requests, steps, width}, rows, "rows");
  return {requests, nodes, steps, width * static_cast<int64_t>(rows.element_size())};
}

MaskSizes CheckTreeMask(const at::Tensor& ancestors, const at::Tensor& prefix_lens,
                        const at::Tensor& mask, const at::Tensor& mask_indptr, bool write_prefix) {
  CheckDim(ancestors, "ancestors", 3, "[bs, N, W]");
  CheckDim(mask, "mask", 1, "[M]");
  const int64_t requests = ancestors.size(0);
  const int64_t nodes = ancestors.size(1);
  CheckRange(nodes, "ancestors.shape[1] (N)", 1, kMaxNodes);
  CheckRange(requests, "ancestors.shape[0] (bs)", 0, 65535);
  const at::ScalarType mask_type = mask.scalar_type();
  Require(mask_type == at::kBool || mask_type == at::kByte,
              "`mask` must be bool or uint8, got ", mask_type);
  const int64_t words = (nodes + 63) / 64;
  Check(ancestors, "ancestors", at::kLong, {requests, nodes, words}, mask, "mask");
  Check(prefix_lens, "prefix_lens", at::kLong, {requests}, ancestors, "ancestors");
  Check(mask, "mask", mask_type, {mask.size(0)}, ancestors, "ancestors");
  Check(mask_indptr, "mask_indptr", at::kLong, {requests + 1}, ancestors, "ancestors");
  return {requests,
          {ancestors.const_data_ptr<int64_t>(), prefix_lens.const_data_ptr<int64_t>(),
           mask_indptr.const_data_ptr<int64_t>(), static_cast<uint8_t*>(mask.data_ptr()),
           mask.size(0), static_cast<int>(nodes), static_cast<int>(words), write_prefix}};
}

AttentionSizes CheckTreeAttention(const at::Tensor& q, const at::Tensor& k_tail,
                                  const at::Tensor& ancestors, const at::Tensor& prefix_out,
                                  const at::Tensor& prefix_lse, double scale,
                                  const at::Tensor& out) {
  CheckDim(ancestors, "ancestors", 3, "[bs, N, W]");
  CheckDim(q, "q", 3, "[bs * N, h, 576]");
  const int64_t requests = ancestors.size(0);
  const int64_t nodes = ancestors.size(1);
  const int64_t heads = q.size(1);
  const at::ScalarType dtype = q.scalar_type();
  Require(dtype == at::kFloat || dtype == at::kBFloat16, "`q` must be float32 or bfloat16, got ",
          dtype);
  CheckRange(nodes, "ancestors.shape[1] (N)", 1, kMaxNodes);
  CheckRange(heads, "q.shape[1] (h)", 1, 65535);
  Require(std::isfinite(scale), "`scale` must be finite");
  Check(ancestors, "ancestors", at::kLong, {requests, nodes, (nodes + 63) / 64}, q, "q");
  const int64_t queries = requests * nodes;
  Check(q, "q", dtype, {queries, heads, kKeyDim}, ancestors, "ancestors");
  Check(k_tail, "k_tail", dtype, {queries, kKeyDim}, q, "q");
  Check(prefix_out, "prefix_out", dtype, {queries, heads, kLatentDim}, q, "q");
  Check(prefix_lse, "prefix_lse", at::kFloat, {requests, heads, nodes}, q, "q");
  Check(out, "out", dtype, {queries, heads, kLatentDim}, q, "q");
  CheckAlignment(q, "q");
  CheckAlignment(k_tail, "k_tail");
  CheckAlignment(prefix_out, "prefix_out");
  CheckAlignment(out, "out");
  const auto view = [&](auto element) -> AttentionView<decltype(element)> {
    using T = decltype(element);
    return {static_cast<const T*>(q.const_data_ptr()),
            static_cast<const T*>(k_tail.const_data_ptr()),
            ancestors.const_data_ptr<int64_t>(),
            static_cast<const T*>(prefix_out.const_data_ptr()),
            prefix_lse.const_data_ptr<float>(),
            static_cast<T*>(out.data_ptr()),
            scale,
            static_cast<int>(nodes),
            static_cast<int>((nodes + 63) / 64),
            static_cast<int>(heads)};
  };
  if (dtype == at::kFloat) return {requests, view(float{})};
  return {requests, view(BFloat16{})};
}

}  // namespace kdtree
