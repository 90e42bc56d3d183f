// bfloat16 as plain C++, so that a framework-free caller has the type on the host and in kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "kdtree/tree.h"

namespace kdtree {

/*!
 * \brief The upper half of a float's bits.
 */
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;

  /*!
   * \brief Rounds to nearest, ties to even; NaN stays NaN.
   */
  KDTREE_HOST_DEVICE explicit BFloat16(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = word + 0x7fffu + (word >> 16 & 1);
    bits = static_cast<uint16_t>((is_nan ? word | 0x400000u : rounded) >> 16);
  }

  KDTREE_HOST_DEVICE explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &word, sizeof(value));
    return value;
  }
};

static_assert(sizeof(BFloat16) == 2, "BFloat16 is laid out as every framework's");

}  // namespace kdtree
