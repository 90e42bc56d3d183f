// Reads a KDTR file and writes its tensors again.
//
//     kdtr_copy FROM TO

#include <cstdio>

#include "kdtree/kdtr.h"

int main(int argc, char** argv) {
  namespace kdtr = kdtree::kdtr;
  if (argc != 3) {
    std::fprintf(stderr, "usage: kdtr_copy FROM TO\n");
    return 2;
  }
  try {
    const kdtr::File file = kdtr::File::Open(argv[1]);
    kdtr::Writer writer;
    for (const kdtr::Tensor& tensor : file.tensors()) {
      writer.Add(tensor.name, tensor.dtype, tensor.shape, tensor.data);
    }
    writer.Write(argv[2]);
  } catch (const kdtr::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
