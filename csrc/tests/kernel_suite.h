// The kernel suite: runs the framework-free ops over the cases that tests/suite/suite_cases.py
// writes, one KDTR file each, and compares what they give with what the references gave.
//
// A case is a list of calls on a Device, which kernel_suite.cpp and kernel_suite.cu define: memory,
// a way to run calls one after another without the host in between, and one call an op.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "kdtree/accept_tree.h"
#include "kdtree/compact_kv.h"
#include "kdtree/kdtr.h"
#include "kdtree/tree.h"
#include "kdtree/tree_attention.h"
#include "kdtree/tree_mask.h"

namespace kdtree {
namespace suite {

// What outputs hold before a run, and their surroundings before and after it.
constexpr unsigned char kPoison = 0x5A;
constexpr size_t kGuardBytes = 256;

/*!
 * \brief How far a computed number may be from the expected one; what is expected to be NaN is
 * undefined and not compared.
 */
struct Tolerance {
  double absolute;      // of each element,
  double relative;      // and this part of its magnitude,
  double row_relative;  // or, if not 0, of the norm of a row instead
};
constexpr Tolerance kLogSumExp = {1e-5, 1e-6, 0};
constexpr Tolerance kFloatAttention = {1e-6, 0, 0};
constexpr Tolerance kBFloat16Attention = {0, 0, 1e-2};

inline int64_t CountOf(const kdtr::Tensor& tensor) {
  int64_t count = 1;
  for (const uint64_t size : tensor.shape) count *= static_cast<int64_t>(size);
  return count;
}

/*!
 * \brief The text "name[i, j, ...]" of one element.
 */
inline std::string ElementOf(const kdtr::Tensor& tensor, int64_t index) {
  std::string text;
  for (size_t axis = tensor.shape.size(); axis-- > 0;) {
    const int64_t size = static_cast<int64_t>(tensor.shape[axis]);
    text = std::to_string(index % size) + (text.empty() ? "" : ", ") + text;
    index /= size;
  }
  return tensor.name + "[" + text + "]";
}

inline std::string TextOf(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

template <typename T>
double NumberOf(T value) {
  return static_cast<double>(value);
}
inline double NumberOf(BFloat16 value) { return static_cast<double>(static_cast<float>(value)); }

/*!
 * \brief A tensor's elements; throws kdtr::Error where they are of another type.
 */
template <typename T>
const T* ElementsOf(const kdtr::Tensor& tensor) {
  return tensor.As<T>();
}
template <>
inline const BFloat16* ElementsOf<BFloat16>(const kdtr::Tensor& tensor) {
  if (tensor.dtype != kdtr::DType::kBf16) throw kdtr::Error(tensor.name + " is not bf16");
  return reinterpret_cast<const BFloat16*>(tensor.As<uint16_t>());
}

inline std::vector<double> DoublesOf(const kdtr::Tensor& tensor) {
  std::vector<double> values(static_cast<size_t>(CountOf(tensor)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = tensor.dtype == kdtr::DType::kF64 ? tensor.As<double>()[i]
                                                  : static_cast<double>(tensor.As<float>()[i]);
  }
  return values;
}

/*!
 * \brief What is wrong with an output that must have the expected bits; empty if nothing is.
 */
template <typename T>
std::string CompareBits(const T* got, const kdtr::Tensor& expected) {
  const T* want = ElementsOf<T>(expected);
  for (int64_t i = 0; i < CountOf(expected); ++i) {
    if (std::memcmp(got + i, want + i, sizeof(T)) != 0) {
      return ElementOf(expected, i) + " is " + TextOf(NumberOf(got[i])) + ", expected " +
             TextOf(NumberOf(want[i]));
    }
  }
  return "";
}

/*!
 * \brief What is wrong with an output that must be near the expected one; empty if nothing is.
 *
 * \param worst Raised to the greatest share of the tolerance that was used.
 */
template <typename T>
std::string CompareNear(const T* got, const kdtr::Tensor& expected, const Tolerance& tolerance,
                        double* worst) {
  const std::vector<double> want = DoublesOf(expected);
  const size_t row = tolerance.row_relative > 0 ? expected.shape.back() : 1;
  for (size_t first = 0; first < want.size(); first += row) {
    double error = 0.0;
    double norm = 0.0;
    bool defined = true;
    for (size_t i = first; i < first + row; ++i) {
      const double value = NumberOf(got[i]);
      defined = defined && !std::isnan(want[i]);
      // Equal infinities have no difference.
      const double difference = value == want[i] ? 0.0 : value - want[i];
      error += difference * difference;
      norm += want[i] * want[i];
    }
    if (!defined) continue;
    const double allowed =
        tolerance.row_relative > 0
            ? tolerance.row_relative * std::sqrt(norm)
            : tolerance.absolute + (norm < INFINITY ? tolerance.relative * std::sqrt(norm) : 0.0);
    const double share = std::sqrt(error) / allowed;
    // Negated, so that a NaN fails.
    if (!(share <= 1.0)) {
      return ElementOf(expected, static_cast<int64_t>(first)) + " is off by " +
             TextOf(std::sqrt(error)) + ", allowed " + TextOf(allowed);
    }
    if (share > *worst) *worst = share;
  }
  return "";
}

/*!
 * \brief The arguments and outputs of one case, on the device.
 */
template <typename Device>
class Case {
 public:
  Case(Device& device, const kdtr::File& file) : device_(device), file_(file) {}
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;
  ~Case() {
    for (const Block& block : blocks_) device_.Free(block.memory);
  }

  Device& device() { return device_; }
  const kdtr::Tensor& Argument(const std::string& name) const { return file_.At("in." + name); }
  int64_t Integer(const std::string& name) const { return *Argument(name).template As<int64_t>(); }
  double Real(const std::string& name) const { return *Argument(name).template As<double>(); }
  int64_t Size(const std::string& name, size_t axis) const {
    const kdtr::Tensor& tensor = Argument(name);
    if (axis >= tensor.shape.size()) throw kdtr::Error("in." + name + " has too few axes");
    return static_cast<int64_t>(tensor.shape[axis]);
  }

  /*!
   * \brief Argument `name` on the device.
   */
  template <typename T>
  const T* In(const std::string& name) {
    const kdtr::Tensor& tensor = Argument(name);
    T* at = static_cast<T*>(Allocate(tensor.bytes));
    device_.Upload(at, ElementsOf<T>(tensor), tensor.bytes);
    return at;
  }

  /*!
   * \brief Poisoned memory for result `name`, which must get its bits.
   */
  template <typename T>
  T* Out(const std::string& name) {
    const kdtr::Tensor& expected = Result(name);
    ElementsOf<T>(expected);
    return Expect<T>(expected, [&expected](const T* got, double*) {
      return CompareBits(got, expected);
    });
  }

  /*!
   * \brief Poisoned memory for result `name`, which must come within a tolerance.
   */
  template <typename T>
  T* OutNear(const std::string& name, const Tolerance& tolerance) {
    const kdtr::Tensor& expected = Result(name);
    return Expect<T>(expected, [&expected, tolerance](const T* got, double* worst) {
      return CompareNear(got, expected, tolerance, worst);
    });
  }

  /*!
   * \brief Memory that holds argument `in` and must become result `out`.
   */
  template <typename T>
  T* InOut(const std::string& in, const std::string& out) {
    T* at = Out<T>(out);
    const kdtr::Tensor& before = Argument(in);
    if (before.bytes != Result(out).bytes) throw kdtr::Error("in." + in + " is not out." + out);
    device_.Upload(at, ElementsOf<T>(before), before.bytes);
    return at;
  }

  /*!
   * \brief Memory for what no result is compared with.
   */
  template <typename T>
  T* Scratch(int64_t count) {
    return static_cast<T*>(Allocate(sizeof(T) * static_cast<size_t>(count)));
  }

  /*!
   * \brief Row buffers kv.0, kv.1, ..., moved in place, as compact_kv takes them.
   */
  CompactView KvBuffers(const int32_t* path, int path_stride, const int32_t* accept_len,
                        int64_t* buffers) {
    std::vector<int64_t> addresses;
    std::vector<int64_t> row_bytes;
    for (int i = 0; file_.Has("in.kv." + std::to_string(i)); ++i) {
      const std::string name = "kv." + std::to_string(i);
      addresses.push_back(reinterpret_cast<int64_t>(InOut<uint8_t>(name, name)));
      row_bytes.push_back(Size(name, 1));
    }
    *buffers = static_cast<int64_t>(addresses.size());
    return {Uploaded(addresses), Uploaded(row_bytes), In<int64_t>("slots"), path, accept_len,
            static_cast<int>(Size("slots", 1)), path_stride};
  }

  /*!
   * \brief What is wrong with the outputs or with the memory around them; empty if nothing is.
   *
   * \param worst The greatest share of a tolerance that was used, 0 if there is none.
   */
  std::string Check(double* worst) {
    *worst = 0.0;
    for (const auto& check : checks_) {
      const std::string wrong = check(worst);
      if (!wrong.empty()) return wrong;
    }
    for (const Block& block : blocks_) {
      std::vector<unsigned char> bytes(block.bytes + 2 * kGuardBytes);
      device_.Download(bytes.data(), block.memory, bytes.size());
      for (size_t i = 0; i < kGuardBytes; ++i) {
        if (bytes[i] != kPoison || bytes[bytes.size() - 1 - i] != kPoison) {
          return "memory beside a buffer of " + std::to_string(block.bytes) + " bytes was written";
        }
      }
    }
    return "";
  }

 private:
  struct Block {
    char* memory;
    size_t bytes;
  };

  const kdtr::Tensor& Result(const std::string& name) const { return file_.At("out." + name); }

  void* Allocate(size_t bytes) {
    char* memory = static_cast<char*>(device_.Allocate(bytes + 2 * kGuardBytes));
    blocks_.push_back({memory, bytes});
    const std::vector<unsigned char> poison(bytes + 2 * kGuardBytes, kPoison);
    device_.Upload(memory, poison.data(), poison.size());
    return memory + kGuardBytes;
  }

  const int64_t* Uploaded(const std::vector<int64_t>& values) {
    int64_t* at = Scratch<int64_t>(static_cast<int64_t>(values.size()));
    device_.Upload(at, values.data(), sizeof(int64_t) * values.size());
    return at;
  }

  template <typename T, typename Compare>
  T* Expect(const kdtr::Tensor& expected, const Compare& compare) {
    const size_t count = static_cast<size_t>(CountOf(expected));
    T* at = Scratch<T>(static_cast<int64_t>(count));
    checks_.push_back([this, at, count, compare](double* worst) {
      std::vector<T> got(count);
      device_.Download(got.data(), at, sizeof(T) * count);
      return compare(got.data(), worst);
    });
    return at;
  }

  Device& device_;
  const kdtr::File& file_;
  std::vector<Block> blocks_;
  std::vector<std::function<std::string(double*)>> checks_;
};

template <typename Device>
TreeView TreeOutputs(Case<Device>& c) {
  const int nodes = static_cast<int>(c.Integer("budget")) + 1;
  return {c.template Out<int64_t>("tokens"),     c.template Out<int32_t>("parents"),
          c.template Out<int32_t>("depths"),     c.template Out<float>("log_mass"),
          c.template Out<int64_t>("positions"),  c.template Out<int64_t>("ancestors"),
          c.template Out<int32_t>("next_token"), c.template Out<int32_t>("next_sibling"),
          c.template Out<int32_t>("num_nodes"),  nodes,
          (nodes + 63) / 64};
}

/*!
 * \brief The call of build_tree; the memory is allocated here, the call comes later.
 */
template <typename Device>
std::function<void()> BuildCall(Case<Device>& c, const TreeView& trees) {
  const int64_t* ids = c.template In<int64_t>("ids");
  const float* log_probs = c.template In<float>("log_probs");
  const int64_t* root = c.template In<int64_t>("root");
  const int64_t* prefix_lens = c.template In<int64_t>("prefix_lens");
  return [=, &c] {
    c.device().BuildTree(ids, log_probs, root, prefix_lens, c.Size("ids", 0),
                         static_cast<int>(c.Size("ids", 1)), static_cast<int>(c.Size("ids", 2)),
                         static_cast<int>(c.Integer("budget")), trees);
  };
}

template <typename Device>
void RunBuild(Case<Device>& c) {
  c.device().Run(BuildCall(c, TreeOutputs(c)));
}

template <typename Device>
AcceptView AcceptOutputs(Case<Device>& c, int nodes, int max_depth) {
  AcceptView view = {};
  view.path = c.template Out<int32_t>("path");
  view.accept_len = c.template Out<int32_t>("accept_len");
  view.bonus = c.template Out<int64_t>("bonus");
  view.out_tokens = c.template Out<int64_t>("out_tokens");
  view.new_seq_lens = c.template Out<int64_t>("new_seq_lens");
  view.nodes = nodes;
  view.max_depth = max_depth;
  return view;
}

template <typename Device>
void RunAccept(Case<Device>& c) {
  AcceptView view = AcceptOutputs(c, static_cast<int>(c.Size("tokens", 1)),
                                  static_cast<int>(c.Integer("max_depth")));
  view.tokens = c.template In<int64_t>("tokens");
  view.next_token = c.template In<int32_t>("next_token");
  view.next_sibling = c.template In<int32_t>("next_sibling");
  view.num_nodes = c.template In<int32_t>("num_nodes");
  view.predictions = c.template In<int64_t>("predictions");
  view.prefix_lens = c.template In<int64_t>("prefix_lens");
  c.device().Run([&] { c.device().AcceptTree(view, c.Size("tokens", 0)); });
}

template <typename T, typename Device>
AttentionView<T> AttentionArguments(Case<Device>& c, const std::string& prefix, T* out) {
  AttentionView<T> view = {};
  view.q = c.template In<T>(prefix + "q");
  view.k_tail = c.template In<T>(prefix + "k_tail");
  view.prefix_out = c.template In<T>(prefix + "prefix_out");
  view.prefix_lse = c.template In<float>(prefix + "prefix_lse");
  view.out = out;
  view.scale = c.Real("scale");
  view.heads = static_cast<int>(c.Size(prefix + "prefix_lse", 1));
  view.nodes = static_cast<int>(c.Size(prefix + "prefix_lse", 2));
  view.words = (view.nodes + 63) / 64;
  return view;
}

template <typename Device>
void RunAttention(Case<Device>& c) {
  float* out = c.template OutNear<float>("f32.out", kFloatAttention);
  BFloat16* out_16 = c.template OutNear<BFloat16>("bf16.out", kBFloat16Attention);
  AttentionView<float> view = AttentionArguments(c, "f32.", out);
  AttentionView<BFloat16> view_16 = AttentionArguments(c, "bf16.", out_16);
  view.ancestors = view_16.ancestors = c.template In<int64_t>("ancestors");
  c.device().Run([&] {
    c.device().TreeAttention(view, c.Size("ancestors", 0));
    c.device().TreeAttention(view_16, c.Size("ancestors", 0));
  });
}

template <typename Device>
void RunTopk(Case<Device>& c) {
  int64_t* ids = c.template Out<int64_t>("ids");
  float* values = c.template Out<float>("values");
  float* lse = c.template OutNear<float>("lse", kLogSumExp);
  const auto run = [&](const auto* logits) {
    c.device().Run([&] {
      c.device().DraftTopk(logits, c.Size("logits", 0), c.Size("logits", 1),
                           static_cast<int>(c.Integer("k")), c.Integer("vocab_start"), ids, values,
                           lse);
    });
  };
  if (c.Argument("logits").dtype == kdtr::DType::kBf16) {
    run(c.template In<BFloat16>("logits"));
  } else {
    run(c.template In<float>("logits"));
  }
}

template <typename Device>
void RunMerge(Case<Device>& c) {
  const int64_t* ids = c.template In<int64_t>("ids");
  const float* values = c.template In<float>("values");
  const float* lse = c.template In<float>("lse");
  int64_t* out_ids = c.template Out<int64_t>("ids");
  float* out_values = c.template Out<float>("values");
  float* out_lse = c.template OutNear<float>("lse", kLogSumExp);
  c.device().Run([&] {
    c.device().MergeTopk(ids, values, lse, static_cast<int>(c.Size("ids", 0)), c.Size("ids", 1),
                         static_cast<int>(c.Size("ids", 2)), static_cast<int>(c.Integer("k_out")),
                         out_ids, out_values, out_lse);
  });
}

template <typename Device>
void RunMask(Case<Device>& c) {
  MaskView tree = {};
  tree.ancestors = c.template In<int64_t>("ancestors");
  tree.prefix_lens = c.template In<int64_t>("prefix_lens");
  tree.indptr = c.template In<int64_t>("mask_indptr");
  tree.mask = c.template InOut<uint8_t>("mask", "tree");
  tree.size = c.Size("mask", 0);
  tree.nodes = static_cast<int>(c.Size("ancestors", 1));
  tree.words = static_cast<int>(c.Size("ancestors", 2));
  tree.write_prefix = false;
  MaskView whole = tree;
  whole.mask = c.template InOut<uint8_t>("mask", "whole");
  whole.write_prefix = true;
  c.device().Run([&] {
    c.device().TreeMask(tree, c.Size("ancestors", 0));
    c.device().TreeMask(whole, c.Size("ancestors", 0));
  });
}

template <typename Device>
void RunGather(Case<Device>& c) {
  const int32_t* path = c.template In<int32_t>("path");
  const auto run = [&](const auto* rows, auto* out) {
    const int64_t row_bytes = c.Size("rows", 1) * static_cast<int64_t>(sizeof(*rows));
    c.device().Run([&] {
      c.device().GatherPath(rows, path, c.Size("path", 0), c.Integer("num_nodes_per_request"),
                            c.Size("path", 1), row_bytes, out);
    });
  };
  if (c.Argument("rows").dtype == kdtr::DType::kBf16) {
    run(c.template In<BFloat16>("rows"), c.template Out<BFloat16>("out"));
  } else {
    run(c.template In<float>("rows"), c.template Out<float>("out"));
  }
}

template <typename Device>
void RunCompact(Case<Device>& c) {
  int64_t buffers = 0;
  const int32_t* path = c.template In<int32_t>("path");
  const int32_t* accept_len = c.template In<int32_t>("accept_len");
  const CompactView view =
      c.KvBuffers(path, static_cast<int>(c.Size("path", 1)), accept_len, &buffers);
  c.device().Run([&] { c.device().CompactKv(view, buffers, c.Size("slots", 0)); });
}

/*!
 * \brief One decode step. Each op reads what the one before it wrote on the device; the attention
 * output of a row, over all heads, stands for its logits.
 */
template <typename Device>
void RunCompose(Case<Device>& c) {
  const int64_t requests = c.Size("ids", 0);
  const int depths = static_cast<int>(c.Size("ids", 1));
  const TreeView trees = TreeOutputs(c);
  const std::function<void()> build = BuildCall(c, trees);
  const int64_t rows = requests * trees.nodes;

  AttentionView<float> attention =
      AttentionArguments(c, "", c.template OutNear<float>("attention", kFloatAttention));
  attention.ancestors = trees.ancestors;
  const int64_t logits = int64_t{attention.heads} * kLatentDim;
  int64_t* predictions = c.template Out<int64_t>("predictions");
  float* greatest = c.template Scratch<float>(rows);
  float* lse = c.template Scratch<float>(rows);

  AcceptView accept = AcceptOutputs(c, trees.nodes, depths);
  accept.tokens = trees.tokens;
  accept.next_token = trees.next_token;
  accept.next_sibling = trees.next_sibling;
  accept.num_nodes = trees.num_nodes;
  accept.predictions = predictions;
  accept.prefix_lens = c.template In<int64_t>("prefix_lens");

  float* gathered = c.template OutNear<float>("gathered", kFloatAttention);
  int64_t buffers = 0;
  const CompactView compact = c.KvBuffers(accept.path, depths + 1, accept.accept_len, &buffers);

  Device& device = c.device();
  device.Run([&] {
    build();
    device.TreeAttention(attention, requests);
    device.DraftTopk(static_cast<const float*>(attention.out), rows, logits, 1, 0, predictions,
                     greatest, lse);
    device.AcceptTree(accept, requests);
    device.GatherPath(attention.out, accept.path, requests, trees.nodes, depths + 1,
                      logits * static_cast<int64_t>(sizeof(float)), gathered);
    device.CompactKv(compact, buffers, requests);
  });
}

/*!
 * \brief Runs the case files named on the command line, a line each; the exit status.
 */
template <typename Device>
int RunSuite(Device& device, int argc, char** argv) {
  const std::map<std::string, void (*)(Case<Device>&)> runners = {
      {"accept", &RunAccept<Device>},   {"attention", &RunAttention<Device>},
      {"build", &RunBuild<Device>},     {"compact", &RunCompact<Device>},
      {"compose", &RunCompose<Device>}, {"gather", &RunGather<Device>},
      {"mask", &RunMask<Device>},       {"merge", &RunMerge<Device>},
      {"topk", &RunTopk<Device>},
  };
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CASE.kdtr...\n", argv[0]);
    return 2;
  }
  std::printf("kernel suite on %s\n", device.name().c_str());
  int passed = 0;
  int failed = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string path = argv[i];
    const std::string name = path.substr(path.find_last_of('/') + 1);
    std::string wrong;
    double worst = 0.0;
    try {
      const auto runner = runners.find(name.substr(0, name.find('-')));
      if (runner == runners.end()) throw std::runtime_error("no op has this case's first word");
      const kdtr::File file = kdtr::File::Open(path);
      Case<Device> c(device, file);
      runner->second(c);
      wrong = c.Check(&worst);
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    ++(wrong.empty() ? passed : failed);
    if (!wrong.empty()) {
      std::printf("FAILED  %s: %s\n", name.c_str(), wrong.c_str());
    } else if (worst > 0.0) {
      std::printf("passed  %s, error %.2f of what is allowed\n", name.c_str(), worst);
    } else {
      std::printf("passed  %s\n", name.c_str());
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace suite
}  // namespace kdtree
