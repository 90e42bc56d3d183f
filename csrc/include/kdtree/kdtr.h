// KDTR: named, typed tensors in one file, exchanged with Python. Reader and writer for POSIX.
//
//   const kdtr::File file = kdtr::File::Open("case.kdtr");
//   const int64_t* ids = file.At("in.ids").As<int64_t>();
//
//   kdtr::Writer writer;
//   writer.Add("out.path", kdtr::DType::kI32, {requests, steps}, path);
//   writer.Write("result.kdtr");
//
// The bytes are specified in docs/kdtr.md; kdtree_sglang/kdtr.py is the Python side. Both readers
// make the same checks in the same order and report them in the same words.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace kdtree::kdtr {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "KDTR data is used in place");

constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxRank = 16;
constexpr uint32_t kMaxNameBytes = 255;

/*!
 * \brief The value of an up to four letter code as the file holds it, zero padded.
 */
constexpr uint32_t DTypeCode(const char* letters) {
  uint32_t code = 0;
  for (int i = 0; i < 4 && letters[i] != '\0'; ++i) {
    code |= static_cast<uint32_t>(static_cast<unsigned char>(letters[i])) << (8 * i);
  }
  return code;
}

enum class DType : uint32_t {
  kBf16 = DTypeCode("bf16"),
  kF16 = DTypeCode("f16"),
  kF32 = DTypeCode("f32"),
  kF64 = DTypeCode("f64"),
  kI8 = DTypeCode("i8"),
  kI16 = DTypeCode("i16"),
  kI32 = DTypeCode("i32"),
  kI64 = DTypeCode("i64"),
  kU8 = DTypeCode("u8"),
  kU64 = DTypeCode("u64"),
  kBool = DTypeCode("bool"),
};

/*!
 * \brief The letters of a dtype's code, such as "bf16".
 */
inline std::string Name(DType dtype) {
  const auto* letters = reinterpret_cast<const char*>(&dtype);
  return std::string(letters, strnlen(letters, sizeof dtype));
}

/*!
 * \brief Bytes of an element; 0 for a value that is no DType.
 */
constexpr uint64_t ItemBytes(DType dtype) {
  switch (dtype) {
    case DType::kI8:
    case DType::kU8:
    case DType::kBool:
      return 1;
    case DType::kBf16:
    case DType::kF16:
    case DType::kI16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF64:
    case DType::kI64:
    case DType::kU64:
      return 8;
  }
  return 0;
}

/*!
 * \brief Whether elements of a dtype are read through a pointer to T; bf16 and f16 are uint16_t,
 * their bits.
 */
template <typename T>
constexpr bool Holds(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
    case DType::kF16:
      return std::is_same_v<T, uint16_t>;
    case DType::kF32:
      return std::is_same_v<T, float>;
    case DType::kF64:
      return std::is_same_v<T, double>;
    case DType::kI8:
      return std::is_same_v<T, int8_t>;
    case DType::kI16:
      return std::is_same_v<T, int16_t>;
    case DType::kI32:
      return std::is_same_v<T, int32_t>;
    case DType::kI64:
      return std::is_same_v<T, int64_t>;
    case DType::kU8:
      return std::is_same_v<T, uint8_t>;
    case DType::kU64:
      return std::is_same_v<T, uint64_t>;
    case DType::kBool:
      return std::is_same_v<T, bool>;
  }
  return false;
}

/*!
 * \brief A file that is not valid KDTR, tensors that KDTR cannot hold, or a file that cannot be
 * opened or written; the message names the file, the tensor and the field.
 */
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/*!
 * \brief A tensor in C order whose data somebody else owns: the File, or the caller of a Writer.
 */
struct Tensor {
  std::string name;
  DType dtype;
  std::vector<uint64_t> shape;
  const uint8_t* data;
  uint64_t bytes;

  /*!
   * \brief The elements; throws Error where they are not of type T, or not aligned for it, which
   * only a buffer given to File::Parse can cause.
   */
  template <typename T>
  const T* As() const;
};

/*!
 * \brief The tensors of a file, in its order.
 *
 * Copies share the memory map, which lives as long as one of them; the pointers of the tensors end
 * with it. Writers replace files as a whole, which leaves a map intact; a file that is cut in place
 * under its readers takes their process down (SIGBUS).
 */
class File {
 public:
  /*!
   * \brief Maps a file and checks it; throws Error.
   * \param verify false leaves out what has to read all the data: its checksums, and that bools
   * are 0 or 1. Everything else is checked either way.
   */
  static File Open(const std::string& path, bool verify = true);

  /*!
   * \brief The same from memory that outlives the File; errors name the label.
   */
  static File Parse(const void* data, size_t bytes, std::string label, bool verify = true);

  const std::vector<Tensor>& tensors() const { return tensors_; }

  /*!
   * \brief The tensor of a name; throws Error where there is none.
   */
  const Tensor& At(const std::string& name) const;

  bool Has(const std::string& name) const { return index_.count(name) != 0; }

 private:
  std::string label_;
  std::vector<Tensor> tensors_;
  std::unordered_map<std::string, size_t> index_;
  std::shared_ptr<const void> map_;
};

/*!
 * \brief Collects tensors and writes them as one file; the same tensors always give the same bytes.
 */
class Writer {
 public:
  /*!
   * \brief Appends a tensor; throws Error where KDTR cannot hold it.
   * \param name 1..255 bytes of UTF-8 without control characters, given once.
   * \param shape At most 16 dimensions; none for a single value.
   * \param data The elements in C order; read by Write. May be null where there is none.
   */
  void Add(std::string name, DType dtype, std::vector<uint64_t> shape, const void* data);

  /*!
   * \brief Writes the file; throws Error.
   *
   * Atomic: a reader of the path sees the file that was there before or all of the new one, which
   * is on the disk when this returns. Data is streamed, and long runs of zeros become holes.
   */
  void Write(const std::string& path) const;

 private:
  std::vector<Tensor> tensors_;
  std::unordered_set<std::string> names_;
};

namespace detail {

constexpr std::array<uint8_t, 8> kMagic = {'K', 'D', 'T', 'R', '\r', '\n', 0x1a, '\n'};
constexpr uint64_t kHeaderBytes = 32;
constexpr uint64_t kCrcBegin = 16;         // header_crc32 covers what follows it
constexpr uint64_t kEntryFixedBytes = 32;  // before the shape and the name
constexpr uint64_t kEntryAlignment = 16;
constexpr uint64_t kMinEntryBytes = 48;
constexpr uint64_t kDataAlignment = 64;
constexpr uint64_t kMaxTensorBytes = (uint64_t{1} << 63) - 1;
constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

template <typename... Parts>
[[noreturn]] void Fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

// Says what errno says.
[[noreturn]] inline void FailSystem(const std::string& path, const char* action) {
  const int code = errno;
  Fail(path, ": cannot ", action, ": ", std::strerror(code));
}

inline std::string Hex(const uint8_t* bytes, size_t count) {
  std::string digits;
  for (size_t i = 0; i < count; ++i) {
    digits += "0123456789abcdef"[bytes[i] >> 4];
    digits += "0123456789abcdef"[bytes[i] & 15];
  }
  return digits;
}

inline std::string HexNumber(uint32_t value) {
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(value));
  return digits;
}

template <typename T>
T Load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void Append(std::vector<uint8_t>* bytes, const T& value) {
  const auto* begin = reinterpret_cast<const uint8_t*>(&value);
  bytes->insert(bytes->end(), begin, begin + sizeof value);
}

// What is rounded here is at most 2^63 + 64: the size of a file, or the end of data in one.
constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr uint64_t EntryBytes(uint64_t rank, uint64_t name_bytes) {
  return RoundUp(kEntryFixedBytes + 8 * rank + name_bytes, kEntryAlignment);
}

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

// Table k holds the checksum of a byte followed by k zero bytes, so that eight bytes take one step.
constexpr CrcTables MakeCrcTables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
    }
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}

inline constexpr CrcTables kCrcTables = MakeCrcTables();

/*!
 * \brief CRC-32 as zlib's crc32; crc is the checksum of what is before.
 */
inline uint32_t Crc32(const uint8_t* data, uint64_t bytes, uint32_t crc = 0) {
  const CrcTables& t = kCrcTables;
  crc = ~crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const uint64_t word = Load<uint64_t>(data) ^ crc;
    crc = t[7][word & 0xff] ^ t[6][word >> 8 & 0xff] ^ t[5][word >> 16 & 0xff] ^
          t[4][word >> 24 & 0xff] ^ t[3][word >> 32 & 0xff] ^ t[2][word >> 40 & 0xff] ^
          t[1][word >> 48 & 0xff] ^ t[0][word >> 56];
  }
  for (; bytes > 0; ++data, --bytes) {
    crc = (crc >> 8) ^ t[0][(crc ^ *data) & 0xff];
  }
  return ~crc;
}

// The first byte is zero, and every other equals the one before it.
inline bool IsZero(const uint8_t* data, uint64_t bytes) {
  return bytes == 0 || (data[0] == 0 && std::memcmp(data, data + 1, bytes - 1) == 0);
}

inline bool AreBools(const uint8_t* data, uint64_t bytes) {
  return std::all_of(data, data + bytes, [](uint8_t byte) { return byte <= 1; });
}

// How errors name a tensor.
inline std::string Where(const std::string& label, uint64_t index, const std::string& name) {
  return label + ": tensor " + std::to_string(index) + " '" + name + "'";
}

// The length of the UTF-8 character at `at`, or 0 where there is none within `room` bytes.
inline size_t Utf8Length(const uint8_t* at, size_t room) {
  const uint8_t lead = at[0];
  if (lead < 0x80) {
    return 1;
  }
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc0 || lead >= 0xf8 || length > room) {
    return 0;
  }
  uint32_t code_point = lead & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((at[i] & 0xc0) != 0x80) {
      return 0;
    }
    code_point = code_point << 6 | (at[i] & 0x3fu);
  }
  constexpr uint32_t kShortest[] = {0x80, 0x800, 0x10000};
  const bool surrogate = code_point >= 0xd800 && code_point < 0xe000;
  const bool sound = code_point >= kShortest[length - 2] && code_point < 0x110000 && !surrogate;
  return sound ? length : 0;
}

// What is wrong with the bytes of a name, or null.
inline const char* NameProblem(const std::string& name) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(name.data());
  for (size_t at = 0; at < name.size();) {
    const size_t length = Utf8Length(bytes + at, name.size() - at);
    if (length == 0) {
      return "not valid UTF-8";
    }
    at += length;
  }
  const bool control = std::any_of(bytes, bytes + name.size(),
                                   [](uint8_t byte) { return byte < 0x20 || byte == 0x7f; });
  return control ? "holds a control character" : nullptr;
}

// The bytes of a tensor. Also of an empty one the other dimensions are bounded, as strides need it.
inline uint64_t TensorBytes(DType dtype, const std::vector<uint64_t>& shape,
                            const std::string& where) {
  uint64_t bytes = ItemBytes(dtype);
  bool empty = false;
  for (const uint64_t dimension : shape) {
    if (dimension == 0) {
      empty = true;
    } else if (bytes > kMaxTensorBytes / dimension) {
      Fail(where, ": shape: more than 2^63 - 1 bytes, dimensions of 0 left out");
    } else {
      bytes *= dimension;
    }
  }
  return empty ? 0 : bytes;
}

struct Header {
  uint64_t directory_bytes;
  uint64_t tensor_count;
};

// Accepts a header and directory that are as they were written.
inline Header CheckHeader(const uint8_t* data, uint64_t size, const std::string& label) {
  if (size < kHeaderBytes) {
    Fail(label, ": header: the file has ", size, " bytes, a header takes ", kHeaderBytes);
  }
  if (!std::equal(kMagic.begin(), kMagic.end(), data)) {
    Fail(label, ": magic: ", Hex(data, kMagic.size()), " is not KDTR's ",
         Hex(kMagic.data(), kMagic.size()));
  }
  const auto version = Load<uint32_t>(data + 8);
  const auto crc = Load<uint32_t>(data + 12);
  const auto file_bytes = Load<uint64_t>(data + 16);
  const uint64_t directory_bytes = Load<uint32_t>(data + 24);
  const uint64_t tensor_count = Load<uint32_t>(data + 28);
  if (version != kVersion) {
    Fail(label, ": version: ", version, ", this reader knows only ", kVersion);
  }
  if (file_bytes > size) {
    Fail(label, ": file_bytes: ", file_bytes, ", but the file is cut at ", size);
  }
  if (file_bytes < size) {
    Fail(label, ": file_bytes: ", file_bytes, ", but the file has ", size);
  }
  if (directory_bytes > size - kHeaderBytes) {
    Fail(label, ": directory_bytes: ", directory_bytes, " do not fit a file of ", size);
  }
  if (tensor_count > directory_bytes / kMinEntryBytes) {
    Fail(label, ": tensor_count: ", tensor_count, " do not fit a directory of ", directory_bytes);
  }
  const uint32_t computed = Crc32(data + kCrcBegin, kHeaderBytes - kCrcBegin + directory_bytes);
  if (crc != computed) {
    Fail(label, ": header_crc32: ", HexNumber(crc), ", but the bytes give ", HexNumber(computed));
  }
  return {directory_bytes, tensor_count};
}

struct Entry {
  Tensor tensor;  // data is set once the place is checked
  uint32_t crc;
  uint64_t offset;
  uint64_t entry_bytes;
};

// Reads the entry at the begin of the `room` bytes that the directory has left.
inline Entry ParseEntry(const uint8_t* at, uint64_t room, const std::string& label, uint64_t index,
                        const std::unordered_map<std::string, size_t>& earlier) {
  std::string where = label + ": tensor " + std::to_string(index);
  if (room < kEntryFixedBytes) {
    Fail(where, ": entry: the directory has ", room, " bytes left");
  }
  const auto code = Load<uint32_t>(at);
  const auto rank = Load<uint32_t>(at + 4);
  const auto name_bytes = Load<uint32_t>(at + 8);
  const auto crc = Load<uint32_t>(at + 12);
  const auto offset = Load<uint64_t>(at + 16);
  const auto bytes = Load<uint64_t>(at + 24);
  if (rank > kMaxRank) {
    Fail(where, ": rank: ", rank, ", must be at most ", kMaxRank);
  }
  if (name_bytes < 1 || name_bytes > kMaxNameBytes) {
    Fail(where, ": name_bytes: ", name_bytes, ", must be 1..", kMaxNameBytes);
  }
  const uint64_t entry_bytes = EntryBytes(rank, name_bytes);
  if (room < entry_bytes) {
    Fail(where, ": entry: takes ", entry_bytes, " bytes, the directory has ", room, " left");
  }

  const uint8_t* shape_at = at + kEntryFixedBytes;
  const uint8_t* name_at = shape_at + 8 * rank;
  std::string name(reinterpret_cast<const char*>(name_at), name_bytes);
  if (const char* problem = NameProblem(name)) {
    Fail(where, ": name: ", problem);
  }
  if (earlier.count(name) != 0) {
    Fail(where, ": name: '", name, "' is taken by an earlier tensor");
  }
  where = Where(label, index, name);
  if (!IsZero(name_at + name_bytes, entry_bytes - kEntryFixedBytes - 8 * rank - name_bytes)) {
    Fail(where, ": name: the padding after it is not zero");
  }

  const auto dtype = static_cast<DType>(code);
  if (ItemBytes(dtype) == 0) {
    Fail(where, ": dtype: unknown code ", Hex(at, 4));
  }
  std::vector<uint64_t> shape(rank);
  for (uint32_t i = 0; i < rank; ++i) {
    shape[i] = Load<uint64_t>(shape_at + 8 * i);
  }
  const uint64_t expected = TensorBytes(dtype, shape, where);
  if (bytes != expected) {
    Fail(where, ": bytes: ", bytes, ", but shape and dtype give ", expected);
  }
  return {{std::move(name), dtype, std::move(shape), nullptr, bytes}, crc, offset, entry_bytes};
}

// The data must begin at the first aligned offset after what is before it, behind zeros.
inline void CheckPlace(const uint8_t* data, uint64_t size, const Entry& entry,
                       uint64_t previous_end, const std::string& where) {
  const uint64_t offset = entry.offset;
  const uint64_t bytes = entry.tensor.bytes;
  if (offset % kDataAlignment != 0) {
    Fail(where, ": offset: ", offset, " is no multiple of ", kDataAlignment);
  }
  if (offset < previous_end) {
    Fail(where, ": offset: ", offset, " overlaps what ends at ", previous_end);
  }
  if (offset > size || bytes > size - offset) {
    Fail(where, ": offset: ", bytes, " bytes at ", offset, " do not fit a file of ", size);
  }
  const uint64_t expected = RoundUp(previous_end, kDataAlignment);
  if (offset != expected) {
    Fail(where, ": offset: ", offset, " leaves a gap, must be ", expected);
  }
  if (!IsZero(data + previous_end, offset - previous_end)) {
    Fail(where, ": offset: the padding before ", offset, " is not zero");
  }
}

inline void CheckData(const Entry& entry, const std::string& where) {
  const Tensor& tensor = entry.tensor;
  const uint32_t computed = Crc32(tensor.data, tensor.bytes);
  if (entry.crc != computed) {
    Fail(where, ": data_crc32: ", HexNumber(entry.crc), ", but the bytes give ",
         HexNumber(computed));
  }
  if (tensor.dtype == DType::kBool && !AreBools(tensor.data, tensor.bytes)) {
    Fail(where, ": data: a bool is neither 0 nor 1");
  }
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

inline void WriteAt(int fd, const uint8_t* data, uint64_t bytes, uint64_t offset,
                    const std::string& path) {
  while (bytes > 0) {
    const ssize_t written = pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (written < 0) {
      if (errno == EINTR) {
        continue;
      }
      FailSystem(path, "write");
    }
    data += written;
    bytes -= static_cast<uint64_t>(written);
    offset += static_cast<uint64_t>(written);
  }
}

// Writes a tensor's data and gives its checksum; chunks of zeros stay holes.
inline uint32_t WriteData(int fd, const Tensor& tensor, uint64_t offset, const std::string& path) {
  uint32_t crc = 0;
  for (uint64_t begin = 0; begin < tensor.bytes; begin += kChunkBytes) {
    const uint8_t* chunk = tensor.data + begin;
    const uint64_t bytes = std::min(kChunkBytes, tensor.bytes - begin);
    if (tensor.dtype == DType::kBool && !AreBools(chunk, bytes)) {
      Fail(path, ": tensor '", tensor.name, "': data: a bool is neither 0 nor 1");
    }
    crc = Crc32(chunk, bytes, crc);
    if (!IsZero(chunk, bytes)) {
      WriteAt(fd, chunk, bytes, offset + begin, path);
    }
  }
  return crc;
}

inline void WriteTensors(int fd, const std::vector<Tensor>& tensors, const std::string& path) {
  uint64_t directory_bytes = 0;
  for (const Tensor& tensor : tensors) {
    directory_bytes += EntryBytes(tensor.shape.size(), tensor.name.size());
  }
  if (directory_bytes > UINT32_MAX) {
    Fail(path, ": directory_bytes: ", directory_bytes, " do not fit 32 bits");
  }
  std::vector<uint64_t> offsets;
  uint64_t file_bytes = kHeaderBytes + directory_bytes;
  for (const Tensor& tensor : tensors) {
    offsets.push_back(RoundUp(file_bytes, kDataAlignment));
    file_bytes = offsets.back() + tensor.bytes;
    if (file_bytes > kMaxTensorBytes) {
      Fail(path, ": tensor '", tensor.name, "': offset: the file ends past 2^63 - 1");
    }
  }
  // What nothing is written to reads as zeros: padding needs no writing.
  if (ftruncate(fd, static_cast<off_t>(file_bytes)) != 0) {
    FailSystem(path, "write");
  }

  std::vector<uint8_t> covered;
  Append(&covered, file_bytes);
  Append(&covered, static_cast<uint32_t>(directory_bytes));
  Append(&covered, static_cast<uint32_t>(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    Append(&covered, tensor.dtype);
    Append(&covered, static_cast<uint32_t>(tensor.shape.size()));
    Append(&covered, static_cast<uint32_t>(tensor.name.size()));
    Append(&covered, WriteData(fd, tensor, offsets[i], path));
    Append(&covered, offsets[i]);
    Append(&covered, tensor.bytes);
    for (const uint64_t dimension : tensor.shape) {
      Append(&covered, dimension);
    }
    covered.insert(covered.end(), tensor.name.begin(), tensor.name.end());
    covered.resize(RoundUp(covered.size(), kEntryAlignment));
  }
  std::vector<uint8_t> header(kMagic.begin(), kMagic.end());
  Append(&header, kVersion);
  Append(&header, Crc32(covered.data(), covered.size()));
  WriteAt(fd, header.data(), header.size(), 0, path);
  WriteAt(fd, covered.data(), covered.size(), header.size(), path);
  if (fsync(fd) != 0) {
    FailSystem(path, "write");
  }
}

}  // namespace detail

template <typename T>
const T* Tensor::As() const {
  if (!Holds<T>(dtype)) {
    detail::Fail("tensor '", name, "': dtype: ", Name(dtype),
                 " is not read through this type of pointer");
  }
  if (reinterpret_cast<uintptr_t>(data) % alignof(T) != 0) {
    detail::Fail("tensor '", name, "': data: the buffer that was parsed is not aligned");
  }
  return reinterpret_cast<const T*>(data);
}

inline File File::Open(const std::string& path, bool verify) {
  const detail::FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status;
  if (fd.get() < 0 || fstat(fd.get(), &status) != 0) {
    detail::FailSystem(path, "open");
  }
  if (!S_ISREG(status.st_mode)) {
    detail::Fail(path, ": cannot open: not a regular file");
  }
  const auto bytes = static_cast<size_t>(status.st_size);
  if (bytes == 0) {  // cannot be mapped, and Parse has the words for it
    return Parse(nullptr, 0, path, verify);
  }
  void* const map = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (map == MAP_FAILED) {
    detail::FailSystem(path, "map");
  }
  const std::shared_ptr<const void> owner(map, [map, bytes](const void*) { munmap(map, bytes); });
  File file = Parse(map, bytes, path, verify);
  file.map_ = owner;
  return file;
}

inline File File::Parse(const void* data, size_t bytes, std::string label, bool verify) {
  const auto* base = static_cast<const uint8_t*>(data);
  const detail::Header header = detail::CheckHeader(base, bytes, label);
  const uint64_t directory_end = detail::kHeaderBytes + header.directory_bytes;
  uint64_t position = detail::kHeaderBytes;
  uint64_t end = directory_end;
  File file;
  std::vector<detail::Entry> entries;
  for (uint64_t i = 0; i < header.tensor_count; ++i) {
    detail::Entry entry =
        detail::ParseEntry(base + position, directory_end - position, label, i, file.index_);
    detail::CheckPlace(base, bytes, entry, end, detail::Where(label, i, entry.tensor.name));
    entry.tensor.data = base + entry.offset;
    position += entry.entry_bytes;
    end = entry.offset + entry.tensor.bytes;
    file.index_.emplace(entry.tensor.name, i);
    entries.push_back(std::move(entry));
  }
  if (position != directory_end) {
    detail::Fail(label, ": directory_bytes: ", header.directory_bytes, ", but ",
                 header.tensor_count, " entries take ", position - detail::kHeaderBytes);
  }
  if (end != bytes) {
    detail::Fail(label, ": file_bytes: ", bytes, ", but the data ends at ", end);
  }
  for (size_t i = 0; verify && i < entries.size(); ++i) {
    detail::CheckData(entries[i], detail::Where(label, i, entries[i].tensor.name));
  }
  for (detail::Entry& entry : entries) {
    file.tensors_.push_back(std::move(entry.tensor));
  }
  file.label_ = std::move(label);
  return file;
}

inline const Tensor& File::At(const std::string& name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    detail::Fail(label_, ": no tensor '", name, "'");
  }
  return tensors_[found->second];
}

inline void Writer::Add(std::string name, DType dtype, std::vector<uint64_t> shape,
                        const void* data) {
  std::string where = "tensor " + std::to_string(tensors_.size());
  if (name.empty() || name.size() > kMaxNameBytes) {
    detail::Fail(where, ": name_bytes: ", name.size(), ", must be 1..", kMaxNameBytes);
  }
  if (const char* problem = detail::NameProblem(name)) {
    detail::Fail(where, ": name: ", problem);
  }
  if (names_.count(name) != 0) {
    detail::Fail(where, ": name: '", name, "' is taken by an earlier tensor");
  }
  where += " '" + name + "'";
  if (ItemBytes(dtype) == 0) {
    detail::Fail(where, ": dtype: unknown code ", static_cast<uint32_t>(dtype));
  }
  if (shape.size() > kMaxRank) {
    detail::Fail(where, ": rank: ", shape.size(), ", must be at most ", kMaxRank);
  }
  const uint64_t bytes = detail::TensorBytes(dtype, shape, where);
  names_.insert(name);
  tensors_.push_back(
      {std::move(name), dtype, std::move(shape), static_cast<const uint8_t*>(data), bytes});
}

inline void Writer::Write(const std::string& path) const {
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  std::random_device random;
  const std::string temporary =
      folder + "." + detail::HexNumber(random()) + detail::HexNumber(random()) + ".tmp";
  const detail::FileDescriptor fd(
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (fd.get() < 0) {
    detail::FailSystem(path, "write");
  }
  try {
    detail::WriteTensors(fd.get(), tensors_, path);
    if (rename(temporary.c_str(), path.c_str()) != 0) {
      detail::FailSystem(path, "write");
    }
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
  // The new name is durable once its folder is.
  const detail::FileDescriptor folder_fd(
      open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder_fd.get() < 0 || fsync(folder_fd.get()) != 0) {
    detail::FailSystem(path, "write");
  }
}

}  // namespace kdtree::kdtr
