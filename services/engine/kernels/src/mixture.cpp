// Mixtures of experts. Rows are grouped by expert; then all experts' gates are one parallel loop, all
// their down projections another, and the sums of their outputs a third, so that threads wait for
// each other three times, however many experts there are.
#include <string.h>

#include <initializer_list>

#include "buffer.h"
#include "experts.h"
#include "exponential.h"
#include "float_layout.h"
#include "grouped_layout.h"
#include "kernels.h"
#include "threads.h"

namespace {

constexpr int64_t kTile = 32;  // rows and columns of a block of rows in tiles
// Items of a loop for each thread. More even out the threads, but each item prepares its expert's
// rows anew.
constexpr int64_t kItems = 8;
constexpr int64_t kFewRows = 16;  // take as long as one: reading the weights

inline int64_t up_to(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

template <typename T>
T *reserve(Buffer &memory, int64_t count) {
  return static_cast<T *>(memory.reserve(count * static_cast<int64_t>(sizeof(T))));
}

// The rows of one expert, at neighbouring positions. A row is there once for each of its experts
// without weights, which form one group.
struct Group {
  int64_t expert;
  int64_t first, count;  // positions
  int64_t inner;         // elements of the inner rows of the groups before
};

// Neighbouring outputs of one group's product.
struct Item {
  int64_t group;
  int64_t first, last;  // units of outputs
};

// Rows in the order of their experts. Valid until the thread's next mixture.
struct Grouping {
  Group *groups;
  int64_t num_groups;
  int64_t *rows;       // of each position
  int64_t *positions;  // [num_rows, each], in the order of the experts' numbers
  float *factors;      // likewise
  int64_t each;        // experts of a row
  int64_t num_inner;   // elements of all groups' inner rows
};

struct Choice {
  const int64_t *experts;
  const float *factors;
};

// Writes a row's experts in the order of their numbers.
inline void sort_row(const Choice &choice, int64_t row, int64_t per_row, int64_t *experts,
                     float *factors) {
  for (int64_t k = 0; k < per_row; k++) {
    const int64_t expert = choice.experts[row * per_row + k];
    int64_t at = k;
    for (; at > 0 && experts[at - 1] > expert; at--) {
      experts[at] = experts[at - 1];
      factors[at] = factors[at - 1];
    }
    experts[at] = expert;
    factors[at] = choice.factors[row * per_row + k];
  }
}

template <typename Products>
Grouping group_rows(const tw_mixture &m, const Choice &choice, const Products &products) {
  static thread_local Buffer memory[5];
  const int64_t experts = m.experts + m.has_shared, each = m.per_row + m.has_shared;
  const auto number_of = [&](int64_t chosen) { return chosen < m.experts ? chosen : experts; };
  Grouping to{reserve<Group>(memory[0], experts + 1),
              0,
              reserve<int64_t>(memory[1], m.num_rows * each),
              reserve<int64_t>(memory[2], m.num_rows * each),
              reserve<float>(memory[3], m.num_rows * each),
              each,
              0};
  auto *next = reserve<int64_t>(memory[4], experts + 1);  // rows of an expert, then its next position
  memset(next, 0, sizeof(int64_t) * static_cast<size_t>(experts + 1));
  for (int64_t i = 0; i < m.num_rows * m.per_row; i++) next[number_of(choice.experts[i])]++;
  if (m.has_shared) next[m.experts] = m.num_rows;
  int64_t position = 0;
  for (int64_t expert = 0; expert <= experts; expert++) {
    const int64_t count = next[expert];
    next[expert] = position;
    if (!count) continue;
    to.groups[to.num_groups++] = {expert, position, count, to.num_inner};
    position += count;
    if (expert < experts) to.num_inner += up_to(count, Products::kRows) * products.width(expert);
  }
  for (int64_t row = 0; row < m.num_rows; row++) {
    int64_t *positions = to.positions + row * each;
    sort_row(choice, row, m.per_row, positions, to.factors + row * each);
    if (m.has_shared) to.factors[row * each + m.per_row] = 1;
    for (int64_t k = 0; k < each; k++) {
      const bool is_shared = k == m.per_row;
      positions[k] = next[is_shared ? m.experts : number_of(positions[k])]++;
      to.rows[positions[k]] = row;
    }
  }
  return to;
}

// Calls body(item) for all outputs of all groups. units(expert): those of its product.
template <typename Units, typename Body>
void for_outputs(const Grouping &rows, const Units &units, const Body &body) {
  static thread_local Buffer memory;
  auto cost = [&](const Group &group) {
    return units(group.expert) * maximum(group.count, kFewRows);
  };
  int64_t total = 0, count = 0;
  for (int64_t g = 0; g < rows.num_groups; g++) total += cost(rows.groups[g]);
  const int64_t most = total / (kItems * num_threads()) + 1;  // cost of an item
  auto *items = reserve<Item>(memory, rows.num_groups + total / most);
  for (int64_t g = 0; g < rows.num_groups; g++) {
    const int64_t all = units(rows.groups[g].expert);
    const int64_t parts = minimum((cost(rows.groups[g]) + most - 1) / most, all);
    for (int64_t part = 0; part < parts; part++)
      items[count++] = {g, part * all / parts, (part + 1) * all / parts};
  }
  parallel_for(count, [=](int64_t i) { body(items[i]); });
}

// Rows that lie row by row, and weights whose products Weights computes.
template <typename Weights>
class PlainProducts {
 public:
  static constexpr int64_t kRows = 1;  // that lie together

  explicit PlainProducts(const tw_mixture &m)
      : m_(m), weights_(Weights::of(m)), size_(m.dtype == TW_FLOAT32 ? 4 : 2) {}

  int64_t width(int64_t expert) const { return weights_[expert].down.inputs; }
  int64_t gate_units(int64_t expert) const { return units(width(expert)); }
  int64_t down_units(int64_t) const { return units(m_.outputs); }
  int64_t element() const { return size_; }

  void gather(const int64_t *rows, int64_t count, char *to) const {
    const int64_t bytes = m_.inputs * size_;
    for (int64_t i = 0; i < count; i++)
      memcpy(to + i * bytes, static_cast<const char *>(m_.rows) + rows[i] * bytes,
             static_cast<size_t>(bytes));
  }

  // Copies some rows, row by row.
  void copy(const int64_t *rows, int64_t count, char *to) const { gather(rows, count, to); }

  void prefetch(int64_t expert) const { Weights::prefetch(weights_[expert]); }

  void gate(const Group &group, const Item &item, const void *rows, char *inner) const {
    static thread_local Buffer memory;
    const auto &expert = weights_[group.expert];
    const int64_t all = width(group.expert), first = item.first * Weights::kOutputs;
    const int64_t count = minimum(item.last * Weights::kOutputs, all) - first;
    char *both = reserve<char>(memory, group.count * 2 * count * size_);
    multiply(expert.gate, group.count, rows, first, count, both, 2 * count);
    multiply(expert.up, group.count, rows, first, count, both + count * size_, 2 * count);
    const tw_gate call{both,     inner + first * size_, group.count, count, all,
                       m_.alpha, m_.limit,              m_.is_gelu,  m_.dtype};
    tw_gate_rows(&call);
  }

  void down(const Group &group, const Item &item, const void *inner, char *out) const {
    const int64_t first = item.first * Weights::kOutputs;
    const int64_t count = minimum(item.last * Weights::kOutputs, m_.outputs) - first;
    multiply(weights_[group.expert].down, group.count, inner, first, count, out + first * size_,
             m_.outputs);
  }

 private:
  static int64_t units(int64_t outputs) {
    return (outputs + Weights::kOutputs - 1) / Weights::kOutputs;
  }

  // Computes `count` outputs from `first` on, a multiple of a unit.
  template <typename Call>
  void multiply(Call call, int64_t num_rows, const void *rows, int64_t first, int64_t count,
                void *out, int64_t stride) const {
    call.rows = rows;
    if (call.bias) call.bias += first;
    call.out = out;
    call.num_rows = num_rows;
    call.outputs = count;
    call.out_stride = stride;
    call.adds = 0;
    call.dtype = call.out_dtype = m_.dtype;
    Weights::multiply(call, first);
  }

  const tw_mixture &m_;
  const typename Weights::Expert *weights_;
  int64_t size_;
};

struct InGroups {
  using Expert = tw_grouped_expert;
  static constexpr int64_t kOutputs = 16;  // of a unit

  static const Expert *of(const tw_mixture &m) { return m.grouped; }

  static void prefetch(const Expert &weights) {
    tw_prefetch_mapped(&weights.gate);
    if (weights.up.mapped != weights.gate.mapped) tw_prefetch_mapped(&weights.up);
    tw_prefetch_mapped(&weights.down);
  }

  static void multiply(tw_grouped call, int64_t first) {
    call.first_strip += first / kStrip;
    call.first_output = 0;
    tw_grouped_linear(&call);
  }
};

struct InFloats {
  using Expert = tw_float_expert;
  static constexpr int64_t kOutputs = kPanel;

  static const Expert *of(const tw_mixture &m) { return m.floats; }

  static void prefetch(const Expert &) {}

  static void multiply(tw_float_product call, int64_t first) {
    call.packed = static_cast<const uint8_t *>(call.packed) +
                  first * call.inputs * bytes_of(call.weight_dtype);
    tw_float_linear(&call);
  }
};

template <typename Products>
void mix(const tw_mixture &m, const Choice &choice, const Products &products,
         const float *shared_logits) {
  static thread_local Buffer memory[2];
  const Grouping rows = group_rows(m, choice, products);
  const auto has_weights = [&](int64_t expert) { return expert < m.experts + m.has_shared; };
  for (int64_t g = 0; g < rows.num_groups; g++)
    if (has_weights(rows.groups[g].expert)) products.prefetch(rows.groups[g].expert);
  const int64_t size = products.element(), positions = m.num_rows * rows.each;
  char *inner = reserve<char>(memory[0], rows.num_inner * size);
  char *outputs = reserve<char>(memory[1], positions * m.outputs * size);
  for_outputs(rows,
              [&](int64_t expert) { return has_weights(expert) ? products.gate_units(expert) : 0; },
              [&](const Item &item) {
                static thread_local Buffer gathered;
                const Group &group = rows.groups[item.group];
                const void *from = m.rows;
                if (group.count < m.num_rows) {
                  const int64_t padded = up_to(group.count, Products::kRows);
                  char *some = reserve<char>(gathered, padded * m.inputs * size);
                  products.gather(rows.rows + group.first, group.count, some);
                  from = some;
                }
                products.gate(group, item, from, inner + group.inner * size);
              });
  for_outputs(rows,
              [&](int64_t expert) { return has_weights(expert) ? products.down_units(expert) : 1; },
              [&](const Item &item) {
                const Group &group = rows.groups[item.group];
                char *out = outputs + group.first * m.outputs * size;
                if (has_weights(group.expert))
                  products.down(group, item, inner + group.inner * size, out);
                else
                  products.copy(rows.rows + group.first, group.count, out);
              });
  if (shared_logits)
    for (int64_t row = 0; row < m.num_rows; row++) {
      const float logit = shared_logits[row];
      rows.factors[row * rows.each + m.per_row] =
          logit != logit ? logit : 1.0f / (1.0f + exponential(-logit));
    }
  const Combination sum{outputs,    rows.positions, rows.factors, m.out,      m.num_rows,
                        m.outputs, rows.each,      m.dtype,      m.out_dtype};
  expert_kernels().combine(sum);
}

#if defined(TW_X86_64)

// Weights in tiles, or in groups beside rows in tiles.
class TiledProducts {
 public:
  static constexpr int64_t kRows = kTile;

  explicit TiledProducts(const tw_mixture &m) : m_(m) {}

  int64_t width(int64_t expert) const { return m_.downs[expert].inputs; }
  int64_t gate_units(int64_t expert) const { return panels(m_.gates[expert]); }
  int64_t down_units(int64_t expert) const { return panels(m_.downs[expert]); }
  int64_t element() const { return 2; }

  void gather(const int64_t *rows, int64_t count, char *to) const {
    constexpr int64_t kLine = kTile * 2, kBlock = kTile * kLine;  // bytes
    const auto *from = static_cast<const char *>(m_.rows);
    const int64_t blocks = m_.inputs / kTile;
    for (int64_t i = 0; i < count; i++)
      for (int64_t block = 0; block < blocks; block++)
        memcpy(to + (i / kTile * blocks + block) * kBlock + i % kTile * kLine,
               from + (rows[i] / kTile * blocks + block) * kBlock + rows[i] % kTile * kLine, kLine);
  }

  // Copies some rows, row by row.
  void copy(const int64_t *rows, int64_t count, char *to) const {
    constexpr int64_t kLine = kTile * 2;  // bytes
    const auto *from = static_cast<const char *>(m_.rows);
    const int64_t blocks = m_.inputs / kTile;
    for (int64_t i = 0; i < count; i++)
      for (int64_t block = 0; block < blocks; block++)
        memcpy(to + (i * blocks + block) * kLine,
               from + ((rows[i] / kTile * blocks + block) * kTile + rows[i] % kTile) * kLine, kLine);
  }

  void prefetch(int64_t expert) const {
    for (const tw_linear *product : {&m_.gates[expert], &m_.downs[expert]})
      if (product->format == TW_GROUPS) tw_prefetch_mapped(product->groups);
  }

  void gate(const Group &group, const Item &item, const void *rows, char *inner) const {
    multiply(m_.gates[group.expert], group.count, item, rows, inner);
  }

  void down(const Group &group, const Item &item, const void *inner, char *out) const {
    multiply(m_.downs[group.expert], group.count, item, inner, out);
  }

 private:
  static int64_t panels(const tw_linear &product) { return up_to(product.outputs, kTile) / kTile; }

  static void multiply(tw_linear call, int64_t num_rows, const Item &item, const void *rows,
                       void *out) {
    call.rows = rows;
    call.out = out;
    call.num_rows = num_rows;
    call.first_panel = item.first;
    call.last_panel = item.last;
    tw_tiled_linear(&call);
  }

  const tw_mixture &m_;
};

// Returns the float32 products of rows.
float *multiply_rows(const void *rows, int64_t num_rows, const tw_linear &product, Buffer &memory) {
  tw_linear call = product;
  call.rows = rows;
  call.num_rows = num_rows;
  call.out = reserve<float>(memory, num_rows * product.outputs);
  call.epilogue = TW_STORE_FLOAT32;
  tw_tiled_linear(&call);
  return static_cast<float *>(call.out);
}

void mix_tiled(const tw_mixture &m) {
  static thread_local Buffer memory[4];
  Choice choice{m.chosen, m.factors};
  if (m.routing) {
    const void *rows = m.router_rows ? m.router_rows : m.rows;
    const float *scores = multiply_rows(rows, m.num_rows, *m.router, memory[0]);
    auto *chosen = reserve<int64_t>(memory[1], m.num_rows * m.per_row);
    auto *factors = reserve<float>(memory[2], m.num_rows * m.per_row);
    tw_choose_experts(m.routing, scores, m.num_rows, chosen, factors);
    choice = {chosen, factors};
  }
  const float *logits =
      m.shared_router ? multiply_rows(m.rows, m.num_rows, *m.shared_router, memory[3]) : nullptr;
  mix(m, choice, TiledProducts(m), logits);
}

#endif

}  // namespace

void tw_mix_experts(const tw_mixture *mixture) {
  const tw_mixture m = *mixture;
#if defined(TW_X86_64)
  if (m.gates) return mix_tiled(m);
#endif
  const Choice choice{m.chosen, m.factors};
  if (m.floats) return mix(m, choice, PlainProducts<InFloats>(m), nullptr);
  mix(m, choice, PlainProducts<InGroups>(m), nullptr);
}
