// Blocks of weights: 32 inputs of two strips. They are read as they are packed (grouped_layout.h), or
// from a panel of decoded ones, which stays in the L1 cache while many rows pass.
#pragma once

#include "grouped_forms.h"
#include "grouped_layout.h"
#include "grouped_vectors.h"
#include "exponential.h"
#include "kernels.h"

namespace {

#if defined(TW_HAS_VECTORS)

// Returns four inputs of 8 outputs in a unit of 6-bit codes. k: which of the four.
TW_INLINE Integers load_sixes(const uint8_t *unit, int k) {
  const Integers four_bits = load_codes(unit + k / 2 * 32), two_bits = load_codes(unit + 64);
  const Integers high = k == 0   ? raised<4>(two_bits)
                        : k == 1 ? raised<2>(two_bits)
                        : k == 2 ? two_bits
                                 : lowered<2>(two_bits);
  const Integers low = k % 2 ? lowered<4>(four_bits) : four_bits;
  return either(masked(low, 15), masked(high, 48));
}

// Returns four inputs of 8 outputs in a unit, as they are numbered `k`.
template <int kCoding>
TW_INLINE Integers load_four(const uint8_t *unit, int k, const int8_t *values) {
  if (kCoding == 8) return load_codes(unit + 32 * k);
  if (kCoding == 6) return load_sixes(unit + k / 4 * kSixes, k % 4);
  const Integers both = load_codes(unit + k / 2 * 32);
  const Integers codes = masked(k % 2 ? lowered<4>(both) : both, 15);
  return kCoding == 4 ? codes : look_up(values, codes);
}

// Returns the codes of an input of 8 outputs as numbers. codes: of its group.
template <int kCoding>
inline Vector load_input(const tw_grouped &g, const uint8_t *codes, int64_t input) {
  const int64_t half = input / 16, units = half * 16 * kStrip * bits_of(kCoding) / 8;
  Integers bytes = no_integers();
  for (int k = 0; k < 4; k++)
    if (input % 16 / 4 == k) bytes = load_four<kCoding>(codes + units, k, g.values);
  return to_float(bytes_at(bytes, input % 4, has_sign(kCoding)));
}

#else

template <int kCoding>
inline int32_t code_of(const uint8_t *unit, int64_t lane, int64_t input, const int8_t *values) {
  if (kCoding == 8) return static_cast<int8_t>(unit[byte_at(lane, input)]);
  if (kCoding == 6) return six(unit, lane, input);
  const int32_t code = nibble(unit, lane, input);
  return kCoding == kValues ? values[code] : code;
}

// Returns the codes of an input of 8 outputs as numbers. codes: of its group.
template <int kCoding>
inline Vector load_input(const tw_grouped &g, const uint8_t *codes, int64_t input) {
  Vector v;
  for (int64_t lane = 0; lane < kStrip; lane++)
    v.lanes[lane] = static_cast<float>(code_of<kCoding>(codes, lane, input, g.values));
  return v;
}

#endif

// A block as it is packed.
template <typename Form>
struct PackedBlock {
  const int8_t *values;
  const uint8_t *numbers[kStrips], *factors[kStrips];  // of the block's first group
  const uint8_t *codes[kStrips];

  TW_INLINE Vector scale(int s, int part) const {
    return load_numbers<Form::kNumbers>(numbers[s] + part * Form::kPartBytes, factors[s]);
  }

  // Returns what to add for each input of a group: its offset, and the zero that the sums' start takes
  // off although such codes have none.
  TW_INLINE Vector offset(int s, int part) const {
    const uint8_t *at = numbers[s] + part * Form::kPartBytes;
    const Vector each =
        load_numbers<Form::kNumbers>(at + Form::kEach, factors[s] + kStrip * 2);
    if (!Form::kStarts || Form::kSigned) return each;
    return fused(load_numbers<Form::kNumbers>(at, factors[s]), broadcast(zero_of(Form::kCoding)),
                 each);
  }

#if defined(TW_HAS_VECTORS)
  // Returns four inputs of a strip; without a sign for VNNI.
  TW_INLINE Integers four(int s, int k) const {
    constexpr int kFours = Form::kGroup / 4;
    const Integers found = load_four<Form::kCoding>(codes[s] + k / kFours * Form::kPartBytes,
                                                    k % kFours, values);
#if defined(__AVX2__)
    if (kHasVnni && Form::kSigned) return _mm256_xor_si256(found, _mm256_set1_epi8(-128));
#endif
    return found;
  }
#else
  int32_t code(int s, int64_t lane, int64_t input) const {
    const uint8_t *unit = codes[s] + input / Form::kGroup * Form::kPartBytes;
    return code_of<Form::kCoding>(unit, lane, input % Form::kGroup, values);
  }
#endif
};

// The packed blocks of two strips, one after the other.
template <typename Form>
class PackedBlocks {
 public:
  // apart: bytes between the strips.
  PackedBlocks(const tw_grouped &g, const uint8_t *packed, int64_t apart)
      : group_blocks_(maximum(g.group / kBlock, static_cast<int64_t>(1))) {
    block_.values = g.values;
    for (int s = 0; s < kStrips; s++) block_.factors[s] = next_[s] = packed + s * apart;
  }

  // Returns the next block, and prefetches what comes kAhead bytes later.
  TW_INLINE const PackedBlock<Form> &next() {
    if (Form::kFactorBytes && index_ % (kSuper / kBlock) == 0)
      for (int s = 0; s < kStrips; s++) {
        block_.factors[s] = next_[s];
        next_[s] += Form::kFactorBytes;
      }
    const bool begins = Form::kParts > 1 || left_ == 0;
    if (begins) left_ = group_blocks_;
    left_--;
    index_++;
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; s++) {
      if (begins) {
        block_.numbers[s] = next_[s];
        next_[s] += Form::kNumberBytes;
      }
      block_.codes[s] = next_[s];
      next_[s] += Form::kUnitBytes * Form::kParts + Form::kNumberBytes * (Form::kParts - 1);
      for (int64_t line = 0; line < Form::kUnitBytes * Form::kParts; line += kLine)
        __builtin_prefetch(block_.codes[s] + kAhead + line);
    }
    return block_;
  }

 private:
  static constexpr int64_t kLine = 64;    // bytes of a cache line
  static constexpr int64_t kAhead = 2048;  // bytes of weights between those multiplied and prefetched

  int64_t group_blocks_, left_ = 0, index_ = 0;
  const uint8_t *next_[kStrips];
  PackedBlock<Form> block_;
};

#if defined(TW_HAS_VECTORS)

// The form of a panel's blocks, whose numbers are in float32. Codes with a sign have 16 bits if there
// is no instruction for their products: those of pairs fit no 16 bits.
template <typename Packed>
struct PanelForm : Form<Packed::kSigned ? 8 : Packed::kCoding, Packed::kGroup, TW_FLOATS,
                        Packed::kOffsets> {
  static constexpr bool kIsWide = kSixteenBits && Packed::kSigned;
};

// A block of a panel.
template <typename Form>
struct PanelBlock {
  // Vectors of 32 bytes, each strip's after the other.
  static constexpr int64_t kVector = 32, kCodes = Form::kIsWide ? 16 : 8;
  static constexpr int64_t kOffsetVectors = Form::kOffsets ? Form::kParts : 0;
  static constexpr int64_t kFirstOffset = kCodes + Form::kParts;
  static constexpr int64_t kBytes = (kFirstOffset + kOffsetVectors) * kStrips * kVector;

  const uint8_t *at;

  static constexpr int64_t place(int s, int64_t vector) { return (vector * kStrips + s) * kVector; }

  TW_INLINE Integers four(int s, int k) const { return load_codes(at + place(s, k)); }
  TW_INLINE Vector scale(int s, int part) const {
    return load_floats(at + place(s, kCodes + part));
  }
  TW_INLINE Vector offset(int s, int part) const {
    return load_floats(at + place(s, kFirstOffset + part));
  }
};

// A block as it is packed, which a kernel writes to a panel while it reads it: the kernel has to read
// every vector once.
template <typename Packed>
struct DecodedBlock {
  using Panel = PanelBlock<PanelForm<Packed>>;

  const PackedBlock<Packed> &packed;
  uint8_t *to;

  TW_INLINE Integers put(int s, int64_t vector, Integers value) const {
    store_codes(to + Panel::place(s, vector), value);
    return value;
  }
  TW_INLINE Vector put(int s, int64_t vector, Vector value) const {
    put(s, vector, as_integers(value));
    return value;
  }

  TW_INLINE Integers four(int s, int k) const {
#if defined(__AVX2__)
    if (PanelForm<Packed>::kIsWide) {
      const Integers codes = packed.four(s, k / 2);  // inputs 0 and 2, then 1 and 3
      return put(s, k, _mm256_srai_epi16(k % 2 ? codes : _mm256_slli_epi16(codes, 8), 8));
    }
#endif
    return put(s, k, packed.four(s, k));
  }
  TW_INLINE Vector scale(int s, int part) const {
    return put(s, Panel::kCodes + part, packed.scale(s, part));
  }
  TW_INLINE Vector offset(int s, int part) const {
    return put(s, Panel::kFirstOffset + part, packed.offset(s, part));
  }
};

#endif

}  // namespace
