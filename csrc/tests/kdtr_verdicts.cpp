// What the C++ reader says of files that come through standard input, each behind its length as a
// uint64: a line a file, with the error or with "ok" and the tensors.
//
//     kdtr_verdicts < FILES
//
// A tensor is listed as dtype[shape]checksum'name', with the checksum of the data that a caller
// would read. tests/kdtr compares the lines with what the Python reader says.

#include <iostream>
#include <memory>

#include "kdtree/kdtr.h"

int main() {
  namespace kdtr = kdtree::kdtr;
  uint64_t bytes = 0;
  while (std::cin.read(reinterpret_cast<char*>(&bytes), sizeof bytes)) {
    // Allocated to the byte, so that a sanitizer sees the first one behind it.
    const std::unique_ptr<uint8_t[]> data(new uint8_t[bytes]);
    if (!std::cin.read(reinterpret_cast<char*>(data.get()), static_cast<std::streamsize>(bytes))) {
      std::cerr << "kdtr_verdicts: the input ends inside a file\n";
      return 2;
    }
    try {
      const kdtr::File file = kdtr::File::Parse(data.get(), bytes, "input");
      std::cout << "ok";
      for (const kdtr::Tensor& tensor : file.tensors()) {
        std::cout << ' ' << kdtr::Name(tensor.dtype) << '[';
        for (size_t i = 0; i < tensor.shape.size(); ++i) {
          std::cout << (i == 0 ? "" : ",") << tensor.shape[i];
        }
        const uint32_t checksum = kdtr::detail::Crc32(tensor.data, tensor.bytes);
        std::cout << ']' << kdtr::detail::HexNumber(checksum) << '\'' << tensor.name << '\'';
      }
      std::cout << '\n';
    } catch (const kdtr::Error& error) {
      std::cout << error.what() << '\n';
    }
  }
  return 0;
}
