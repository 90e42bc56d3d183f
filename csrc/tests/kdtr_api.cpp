// What a caller of the C++ side can do wrong, and what a caller can rely on.
//
//     kdtr_api FOLDER
//
// Prints each expectation that fails; exits with 1 if one does.

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "kdtree/kdtr.h"

namespace kdtree::kdtr {
namespace {

int failures = 0;

void Expect(bool holds, const std::string& what) {
  if (!holds) {
    std::printf("not so: %s\n", what.c_str());
    ++failures;
  }
}

void ExpectError(const std::string& expected, const std::function<void()>& action) {
  std::string message = "no error";
  try {
    action();
  } catch (const Error& error) {
    message = error.what();
  }
  Expect(message == expected, "'" + expected + "', but '" + message + "'");
}

void AddTo(Writer* writer, const std::string& name, DType dtype = DType::kF32,
           const std::vector<uint64_t>& shape = {}) {
  static const std::vector<uint8_t> kZeros(64);
  writer->Add(name, dtype, shape, kZeros.data());
}

void TestAdd() {
  const auto refuse = [](const std::string& expected, const std::string& name,
                         DType dtype = DType::kF32, const std::vector<uint64_t>& shape = {}) {
    ExpectError(expected, [&] {
      Writer writer;
      AddTo(&writer, "taken");
      AddTo(&writer, name, dtype, shape);
    });
  };
  refuse("tensor 1: name_bytes: 0, must be 1..255", "");
  refuse("tensor 1: name_bytes: 256, must be 1..255", std::string(256, 'n'));
  refuse("tensor 1: name: not valid UTF-8", "\xff");
  refuse("tensor 1: name: holds a control character", "a\nb");
  refuse("tensor 1: name: 'taken' is taken by an earlier tensor", "taken");
  refuse("tensor 1 'x': dtype: unknown code 7", "x", static_cast<DType>(7));
  refuse("tensor 1 'x': rank: 17, must be at most 16", "x", DType::kI8,
         std::vector<uint64_t>(17, 1));
  const uint64_t half = uint64_t{1} << 62;
  refuse("tensor 1 'x': shape: more than 2^63 - 1 bytes, dimensions of 0 left out", "x",
         DType::kI8, {half, 2});
  refuse("tensor 1 'x': shape: more than 2^63 - 1 bytes, dimensions of 0 left out", "x",
         DType::kI16, {0, half});
}

void TestWriteAndRead(const std::string& folder) {
  const std::string path = folder + "/file.kdtr";
  const int64_t ids[] = {7, 8, -1};
  const uint16_t halves[] = {0x3f80, 0x7fc1};
  const uint8_t flags[] = {1, 0};
  Writer writer;
  writer.Add("ids", DType::kI64, {3}, ids);
  writer.Add("halves", DType::kBf16, {2}, halves);
  writer.Add("flags", DType::kBool, {2}, flags);
  writer.Add("none", DType::kF32, {2, 0}, nullptr);
  writer.Write(path);

  std::vector<File> opened;
  opened.push_back(File::Open(path));
  opened.push_back(opened[0]);
  opened.erase(opened.begin());  // the copy keeps the map
  const File& file = opened[0];
  Expect(file.tensors().size() == 4 && file.tensors()[1].name == "halves", "order is kept");
  Expect(file.Has("ids") && !file.Has("id"), "Has tells names");
  Expect(std::equal(ids, ids + 3, file.At("ids").As<int64_t>()), "ids are read");
  Expect(std::equal(halves, halves + 2, file.At("halves").As<uint16_t>()), "bf16 is its bits");
  Expect(file.At("flags").As<bool>()[0] && !file.At("flags").As<bool>()[1], "bools are read");
  Expect(file.At("none").shape == std::vector<uint64_t>({2, 0}) && file.At("none").bytes == 0,
         "an empty tensor keeps its shape");
  ExpectError(path + ": no tensor 'id'", [&] { file.At("id"); });
  ExpectError("tensor 'ids': dtype: i64 is not read through this type of pointer",
              [&] { file.At("ids").As<int32_t>(); });
  ExpectError("tensor 'halves': dtype: bf16 is not read through this type of pointer",
              [&] { file.At("halves").As<int16_t>(); });
}

void TestParse(const std::string& folder) {
  const std::string path = folder + "/file.kdtr";
  const int64_t number = 5;
  Writer writer;
  writer.Add("number", DType::kI64, {}, &number);
  writer.Write(path);
  const File mapped = File::Open(path);
  const uint8_t* data = mapped.At("number").data;
  const uint8_t* begin = data - 128;  // a header of 32 and an entry of 48, padded to 64
  std::vector<uint64_t> buffer(18);
  auto* const bytes = reinterpret_cast<uint8_t*>(buffer.data());

  std::copy(begin, data + 8, bytes);
  const File aligned = File::Parse(bytes, 136, "memory");
  Expect(*aligned.At("number").As<int64_t>() == 5, "a buffer is read in place");
  bytes[128] = 6;
  ExpectError("memory: tensor 0 'number': data_crc32: " +
                  detail::HexNumber(detail::Load<uint32_t>(bytes + 44)) +
                  ", but the bytes give " + detail::HexNumber(detail::Crc32(bytes + 128, 8)),
              [&] { File::Parse(bytes, 136, "memory"); });
  const File unverified = File::Parse(bytes, 136, "memory", false);
  Expect(*unverified.At("number").As<int64_t>() == 6, "verify=false leaves the data out");

  std::copy(begin, data + 8, bytes + 1);
  const File shifted = File::Parse(bytes + 1, 136, "memory");
  ExpectError("tensor 'number': data: the buffer that was parsed is not aligned",
              [&] { shifted.At("number").As<int64_t>(); });
}

void TestWriteErrors(const std::string& folder) {
  const std::string path = folder + "/file.kdtr";
  Writer good;
  AddTo(&good, "x");
  good.Write(path);
  const uint8_t two = 2;
  Writer bad;
  AddTo(&bad, "large", DType::kF32, {4});
  bad.Add("flag", DType::kBool, {}, &two);
  ExpectError(path + ": tensor 'flag': data: a bool is neither 0 nor 1", [&] { bad.Write(path); });
  Expect(File::Open(path).Has("x"), "a failed write leaves the old file");

  Writer endless;
  const uint64_t most = (uint64_t{1} << 63) - 1;
  endless.Add("a", DType::kI8, {most}, nullptr);
  ExpectError(path + ": tensor 'a': offset: the file ends past 2^63 - 1",
              [&] { endless.Write(path); });
  ExpectError(folder + "/none/file.kdtr: cannot write: No such file or directory",
              [&] { good.Write(folder + "/none/file.kdtr"); });
  ExpectError(folder + ": cannot write: Is a directory", [&] { good.Write(folder); });
}

void TestOpenErrors(const std::string& folder) {
  ExpectError(folder + "/none: cannot open: No such file or directory",
              [&] { File::Open(folder + "/none"); });
  ExpectError(folder + ": cannot open: not a regular file", [&] { File::Open(folder); });
  const std::string empty = folder + "/empty";
  std::fclose(std::fopen(empty.c_str(), "w"));
  ExpectError(empty + ": header: the file has 0 bytes, a header takes 32",
              [&] { File::Open(empty); });
}

}  // namespace
}  // namespace kdtree::kdtr

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: kdtr_api FOLDER\n");
    return 2;
  }
  kdtree::kdtr::TestAdd();
  kdtree::kdtr::TestWriteAndRead(argv[1]);
  kdtree::kdtr::TestParse(argv[1]);
  kdtree::kdtr::TestWriteErrors(argv[1]);
  kdtree::kdtr::TestOpenErrors(argv[1]);
  return kdtree::kdtr::failures == 0 ? 0 : 1;
}
