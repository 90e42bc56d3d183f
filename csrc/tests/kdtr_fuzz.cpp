// Gives the KDTR reader damaged files and checks that it refuses them with an Error, or that what
// it accepts is sound. Deterministic: the same seed makes the same files.
//
//     kdtr_fuzz EXECUTIONS [SEED]
//
// Build it with -fsanitize=address,undefined: reads out of bounds must not go unnoticed. Prints how
// often each field was refused; exits with 1 where something is wrong, and where many executions
// have left a check unreached.

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kdtree/kdtr.h"

#if !defined(__SANITIZE_ADDRESS__)
#error "build the fuzzer with -fsanitize=address,undefined"
#endif

// The files are small: a larger allocation comes from a count that nobody checked.
extern "C" const char* __asan_default_options() { return "max_allocation_size_mb=64"; }

namespace kdtree::kdtr {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr uint64_t kReachedAfter = 100000;
const char* const kFields[] = {
    "header",       "magic", "version", "file_bytes", "directory_bytes", "tensor_count",
    "header_crc32", "entry", "rank",    "name_bytes", "name",            "dtype",
    "shape",        "bytes", "offset",  "data_crc32", "data"};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t Below(uint64_t bound) { return engine_() % bound; }
  bool OneIn(uint64_t chances) { return Below(chances) == 0; }

 private:
  std::mt19937_64 engine_;
};

Bytes ReadBytes(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
}

std::vector<Bytes> MakeSeeds(const std::string& path) {
  std::vector<uint8_t> zeros_and_ones(300);
  for (size_t i = 0; i < zeros_and_ones.size(); ++i) {
    zeros_and_ones[i] = i % 3 == 0;
  }
  const void* data = zeros_and_ones.data();
  std::vector<Bytes> seeds;
  const auto add = [&](const Writer& writer) {
    writer.Write(path);
    seeds.push_back(ReadBytes(path));
  };

  add(Writer());
  Writer scalar;
  scalar.Add("budget", DType::kI64, {}, data);
  add(scalar);
  Writer flags;
  flags.Add("flags", DType::kBool, {3, 5}, data);
  flags.Add("more flags", DType::kBool, {70}, data);
  add(flags);
  Writer mixed;
  mixed.Add("a", DType::kBf16, {2, 3, 4}, data);
  mixed.Add("empty", DType::kF32, {0, 7}, nullptr);
  mixed.Add("b", DType::kU8, {65}, data);
  mixed.Add("\xc3\xa9\xe2\x82\xac\xf0\x9f\x8c\xb3", DType::kF64, {1, 1, 1, 1}, data);
  mixed.Add(std::string(kMaxNameBytes, 'n'), DType::kI16, {2}, data);
  mixed.Add("deep", DType::kI8, std::vector<uint64_t>(kMaxRank, 1), data);
  mixed.Add("last", DType::kU64, {3, 0}, nullptr);
  add(mixed);
  return seeds;
}

// A number at a limit of the format or of an integer type, or near one.
uint64_t LimitNumber(Random* random, uint64_t size) {
  const uint64_t limits[] = {0,   16,  48,  64,         255,        uint64_t{1} << 31,
                             uint64_t{1} << 32, uint64_t{1} << 61, uint64_t{1} << 63, size};
  return limits[random->Below(std::size(limits))] + random->Below(3) - 1;
}

template <typename T>
void StoreNumber(Bytes* file, size_t at, Random* random) {
  T value;
  std::memcpy(&value, file->data() + at, sizeof value);
  const int64_t steps[] = {-64, -16, -1, 1, 16, 64};
  value = static_cast<T>(random->OneIn(2)
                             ? LimitNumber(random, file->size())
                             : value + static_cast<T>(steps[random->Below(std::size(steps))]));
  std::memcpy(file->data() + at, &value, sizeof value);
}

void DamageOnce(Bytes* file, Random* random) {
  const size_t size = file->size();
  if (size < 8) {
    return;
  }
  // Half of the damage goes to the header and the first entries.
  const size_t reach = random->OneIn(2) ? std::min<size_t>(size, 160) : size;
  const size_t at = random->Below(reach);
  const size_t word = random->Below(reach / 4 - 1) * 4;
  const size_t count = std::min<size_t>(size - at, 1 + random->Below(48));
  switch (random->Below(8)) {
    case 0:
      (*file)[at] ^= static_cast<uint8_t>(1u << random->Below(8));
      break;
    case 1:
      (*file)[at] = static_cast<uint8_t>(random->Below(256));
      break;
    case 2:
      StoreNumber<uint32_t>(file, word, random);
      break;
    case 3:
      StoreNumber<uint64_t>(file, word, random);
      break;
    case 4:
      file->resize(at);
      break;
    case 5:
      file->insert(file->end(), 1 + random->Below(80), static_cast<uint8_t>(random->Below(2)));
      break;
    case 6: {  // one entry, or half of it, over another
      const Bytes piece(file->begin() + static_cast<ptrdiff_t>(at),
                        file->begin() + static_cast<ptrdiff_t>(at + count));
      const size_t to = random->Below(size - piece.size() + 1);
      std::copy(piece.begin(), piece.end(), file->begin() + static_cast<ptrdiff_t>(to));
      break;
    }
    case 7:
      file->erase(file->begin() + static_cast<ptrdiff_t>(at),
                  file->begin() + static_cast<ptrdiff_t>(at + count));
      break;
  }
}

template <typename T>
void Put(Bytes* file, size_t at, T value) {
  std::memcpy(file->data() + at, &value, sizeof value);
}

// Makes checksums and the size true again, so that the checks behind them are reached.
void Repair(Bytes* file, bool data_too) {
  if (file->size() < detail::kHeaderBytes) {
    return;
  }
  uint8_t* const base = file->data();
  Put<uint64_t>(file, 16, file->size());
  const size_t end = detail::kHeaderBytes +
                     std::min<size_t>(detail::Load<uint32_t>(base + 24),
                                      file->size() - detail::kHeaderBytes);
  size_t at = detail::kHeaderBytes;
  while (data_too && end - at >= detail::kEntryFixedBytes) {
    const auto rank = detail::Load<uint32_t>(base + at + 4);
    const auto name_bytes = detail::Load<uint32_t>(base + at + 8);
    const auto offset = detail::Load<uint64_t>(base + at + 16);
    const auto bytes = detail::Load<uint64_t>(base + at + 24);
    if (offset <= file->size() && bytes <= file->size() - offset) {
      Put(file, at + 12, detail::Crc32(base + offset, bytes));
    }
    const uint64_t entry_bytes = detail::EntryBytes(rank, name_bytes);
    if (entry_bytes > end - at) {
      break;
    }
    at += entry_bytes;
  }
  Put(file, 12, detail::Crc32(base + detail::kCrcBegin, end - detail::kCrcBegin));
}

// What is wrong with a file that the reader accepted, or null.
const char* Unsound(const File& file, const uint8_t* data, size_t size) {
  for (const Tensor& tensor : file.tensors()) {
    uint64_t bytes = ItemBytes(tensor.dtype);
    for (const uint64_t dimension : tensor.shape) {
      bytes *= dimension;
    }
    const auto offset = static_cast<uint64_t>(tensor.data - data);
    if (bytes != tensor.bytes || offset > size || bytes > size - offset) {
      return "a tensor is not inside the file";
    }
    if (offset % detail::kDataAlignment != 0) {
      return "a tensor is not aligned";
    }
    if (!file.Has(tensor.name) || &file.At(tensor.name) != &tensor) {
      return "a tensor is not found by its name";
    }
  }
  return nullptr;
}

// The field that an error names, or the whole message where it names none.
std::string FieldOf(const std::string& message) {
  for (const char* field : kFields) {
    if (message.find(std::string(": ") + field + ": ") != std::string::npos) {
      return field;
    }
  }
  return message;
}

int Main(uint64_t executions, uint64_t seed) {
  char folder[] = "/tmp/kdtr_fuzz.XXXXXX";
  if (mkdtemp(folder) == nullptr) {
    std::perror("kdtr_fuzz: mkdtemp");
    return 2;
  }
  const std::string path = std::string(folder) + "/file.kdtr";
  const std::vector<Bytes> seeds = MakeSeeds(path);
  Random random(seed);
  std::map<std::string, uint64_t> refused;
  uint64_t accepted = 0;
  const char* problem = nullptr;

  for (uint64_t execution = 0; execution < executions && problem == nullptr; ++execution) {
    if (execution % 1000 == 0) {
      alarm(60);  // ends an endless loop
    }
    Bytes file = seeds[random.Below(seeds.size())];
    for (uint64_t i = 1 + random.Below(3); i > 0; --i) {
      DamageOnce(&file, &random);
    }
    if (!random.OneIn(8)) {
      Repair(&file, random.OneIn(2));
    }
    // Allocated to the byte, so that the sanitizer sees the first one behind it.
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[file.size()]);
    std::copy(file.begin(), file.end(), exact.get());
    const bool verify = !random.OneIn(8);
    try {
      const File parsed = File::Parse(exact.get(), file.size(), "input", verify);
      problem = Unsound(parsed, exact.get(), file.size());
      // A file that is verified is determined by its tensors.
      if (problem == nullptr && verify && ++accepted % 64 == 0) {
        Writer writer;
        for (const Tensor& tensor : parsed.tensors()) {
          writer.Add(tensor.name, tensor.dtype, tensor.shape, tensor.data);
        }
        writer.Write(path);
        if (ReadBytes(path) != file) {
          problem = "an accepted file is not what its tensors are written as";
        }
      }
    } catch (const Error& error) {
      ++refused[FieldOf(error.what())];
    }
    if (problem != nullptr) {
      std::fprintf(stderr, "execution %llu: %s\n", static_cast<unsigned long long>(execution),
                   problem);
    }
  }
  unlink(path.c_str());
  rmdir(folder);

  std::printf("C++ reader: %llu executions, %llu accepted, refused by field:",
              static_cast<unsigned long long>(executions),
              static_cast<unsigned long long>(accepted));
  for (const auto& [field, count] : refused) {
    std::printf(" %s %llu", field.c_str(), static_cast<unsigned long long>(count));
  }
  std::printf("\n");
  if (executions >= kReachedAfter && (accepted == 0 || refused.size() != std::size(kFields))) {
    problem = "a check was not reached, or an error names no known field";
    std::fprintf(stderr, "%s\n", problem);
  }
  return problem == nullptr ? 0 : 1;
}

}  // namespace
}  // namespace kdtree::kdtr

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: kdtr_fuzz EXECUTIONS [SEED]\n");
    return 2;
  }
  const uint64_t seed = argc == 3 ? std::stoull(argv[2]) : 0;
  return kdtree::kdtr::Main(std::stoull(argv[1]), seed);
}
