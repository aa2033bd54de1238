// Compression of packed weights.
#include "coded.h"

#include <algorithm>

#include "threads.h"

namespace {

constexpr int kCodes = 16;
constexpr int64_t kBatch = 64;  // steps of a loop's item
// Share of steps with exceptions above which compression does not pay: a part with exceptions is
// decoded before it is multiplied, which costs what fewer bytes save.
constexpr double kMostExceptional = 0.1;

// Codes of a step's upper bytes.
class Codes {
 public:
  explicit Codes(const uint16_t *weights) {
    bool present[256] = {};
    for (int64_t i = 0; i < kStep; i++) present[weights[i] >> 8] = true;
    for (int byte = 0; byte < 256; byte++)
      if (present[byte]) bytes_[distinct_++] = static_cast<uint8_t>(byte);
    if (distinct_ > kCodes) choose(weights);
    for (int i = 0; i < std::min(distinct_, kCodes); i++)
      code_[bytes_[i]] = static_cast<uint8_t>(i);
  }

  int64_t num_exceptions() const { return num_exceptions_; }

  uint8_t byte(int code) const { return bytes_[code]; }

  // Returns the codes of 64 upper bytes; kCodes for a byte without a code.
  __m512i of(__m512i bytes) const {
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(code_), bytes,
                                           _mm512_load_si512(code_ + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(code_ + 128), bytes,
                                            _mm512_load_si512(code_ + 192));
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(bytes), high);
  }

  bool has(uint16_t weight) const { return code_[weight >> 8] < kCodes; }

 private:
  // Gives codes to the most frequent bytes, the lower of equals.
  void choose(const uint16_t *weights) {
    int16_t count[256] = {};
    for (int64_t i = 0; i < kStep; i++) count[weights[i] >> 8]++;
    std::sort(bytes_, bytes_ + distinct_, [&](uint8_t a, uint8_t b) {
      return count[a] != count[b] ? count[a] > count[b] : a < b;
    });
    for (int i = kCodes; i < distinct_; i++) {
      num_exceptions_ += count[bytes_[i]];
      code_[bytes_[i]] = kCodes;
    }
  }

  alignas(64) uint8_t code_[256] = {};
  uint8_t bytes_[256] = {};
  int distinct_ = 0;
  int64_t num_exceptions_ = 0;
};

// Returns the lower or upper bytes of a line of both tiles, in the order of unpacking.
inline __m512i bytes_of(__m512i left, __m512i right, bool upper) {
  const __m512i low = _mm512_set1_epi16(0xff);
  left = upper ? _mm512_srli_epi16(left, 8) : _mm512_and_si512(left, low);
  right = upper ? _mm512_srli_epi16(right, 8) : _mm512_and_si512(right, low);
  return _mm512_packus_epi16(left, right);
}

void code_step(const uint16_t *weights, const Codes &codes, CodedStep &to,
               CodedException *exceptions) {
  const __m512i last = _mm512_set1_epi8(kCodes - 1);  // exceptions may have any code
  for (int i = 0; i < kCodes; i++) to.high[i] = codes.byte(i);
  for (int64_t pair = 0; pair < kTileRows; pair++) {
    __m512i left = _mm512_loadu_si512(weights + pair * kPair);
    __m512i right = _mm512_loadu_si512(weights + kTile + pair * kPair);
    CodedStep::Unit &unit = to.units[pair / 2];
    _mm512_store_si512(unit.low[pair % 2], bytes_of(left, right, false));
    __m512i code = _mm512_min_epu8(codes.of(bytes_of(left, right, true)), last);
    if (pair % 2)
      code = _mm512_or_si512(_mm512_load_si512(unit.codes), _mm512_slli_epi16(code, 4));
    _mm512_store_si512(unit.codes, code);
  }
  if (!codes.num_exceptions()) return;
  for (int64_t i = 0; i < kStep; i++)
    if (!codes.has(weights[i])) *exceptions++ = {static_cast<uint16_t>(i), weights[i]};
}

}  // namespace

int64_t tw_tiled_code(const void *packed, int64_t elements, void *coded, int64_t capacity) {
  const auto *weights = static_cast<const uint16_t *>(packed);
  auto *to = static_cast<CodedStep *>(coded);
  const int64_t steps = elements / kStep, size = steps * static_cast<int64_t>(sizeof(CodedStep));
  const int64_t room = (capacity - size) / static_cast<int64_t>(sizeof(CodedException));
  auto *more = reinterpret_cast<CodedException *>(to + steps);
  int64_t num_more = 0, exceptional = 0;
  parallel_for(divide_up(steps, kBatch), [&](int64_t batch) {
    for (int64_t step = batch * kBatch; step < smaller((batch + 1) * kBatch, steps); step++) {
      const uint16_t *from = weights + step * kStep;
      const Codes codes(from);
      const int64_t number = codes.num_exceptions();
      if (number) __atomic_fetch_add(&exceptional, 1, __ATOMIC_RELAXED);
      to[step].num_exceptions = static_cast<uint32_t>(number);
      CodedException *exceptions = to[step].few;
      if (number > CodedStep::kFewExceptions) {
        int64_t place = __atomic_fetch_add(&num_more, number, __ATOMIC_RELAXED);
        if (place + number > room) continue;
        to[step].place = static_cast<uint32_t>(place);
        exceptions = more + place;
      }
      code_step(from, codes, to[step], exceptions);
    }
  });
  if (static_cast<double>(exceptional) > kMostExceptional * static_cast<double>(steps)) return -1;
  return size + num_more * static_cast<int64_t>(sizeof(CodedException));
}
