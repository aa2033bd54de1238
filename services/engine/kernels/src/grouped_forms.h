// Forms of weights in groups, for each of which there are kernels of its own.
#pragma once

#include "grouped_layout.h"

namespace {

constexpr int64_t kRowsAtOnce = 4;
constexpr int kStrips = 2;  // strips that are multiplied at once

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kHasVnni = true;
#else
constexpr bool kHasVnni = false;
#endif

// Whether products of bytes are summed in 16 bits before they are in 32. A sum has half of a run's
// products. It fits for 4 bits and 32 inputs (15 * 127 * 16), and for 6 bits and 16 inputs once the
// zero of codes is taken off (32 * 127 * 8); on the way there it may wrap around.
#if defined(__AVX2__)
constexpr bool kSixteenBits = !kHasVnni;
#else
constexpr bool kSixteenBits = false;
#endif

// Whether stored codes are numbers with a sign.
constexpr bool has_sign(int coding) { return coding == 8 || coding == kValues; }

// Returns the number of a block's groups.
inline int parts_of(const tw_grouped &g) { return g.group < kBlock ? 2 : 1; }

// Returns the number of a block's runs: inputs whose products start from a sum of their own.
constexpr int runs_of(int coding, int parts) { return kSixteenBits && coding == 6 ? 2 : parts; }

inline int runs_of(const tw_grouped &g) { return runs_of(coding_of(g), parts_of(g)); }

// kGroup: inputs of a block's group, 16 or 32.
template <int kCoding_, int kGroup_, int kNumbers_, bool kOffsets_>
struct Form {
  static constexpr int kCoding = kCoding_, kGroup = kGroup_, kNumbers = kNumbers_;
  static constexpr bool kOffsets = kOffsets_;
  static constexpr bool kSigned = has_sign(kCoding);
  static constexpr int kParts = static_cast<int>(kBlock) / kGroup;
  static constexpr int kRuns = runs_of(kCoding, kParts);
  // Whether sums start from what takes the codes' zero off.
  static constexpr bool kStarts = kSixteenBits ? !kSigned && (!kOffsets || kCoding == 6)
                                  : kHasVnni   ? kSigned || !kOffsets
                                               : !kSigned && !kOffsets;
  static constexpr bool kIsWide = false;  // whether codes have 16 bits
  // Bytes of a strip's group.
  static constexpr int64_t kEach = kStrip * bytes_each(kNumbers);
  static constexpr int64_t kNumberBytes = kEach * (kOffsets ? 2 : 1);
  static constexpr int64_t kUnitBytes = kGroup * kStrip * bits_of(kCoding) / 8;
  static constexpr int64_t kPartBytes = kNumberBytes + kUnitBytes;
  static constexpr int64_t kFactorBytes =
      kNumbers == TW_LEVELS ? kStrip * 2 * (kOffsets ? 2 : 1) : 0;
};

}  // namespace
