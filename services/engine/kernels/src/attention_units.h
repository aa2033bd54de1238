// Units of a step's attention: the rows and keys that a thread computes at once.
#pragma once

#include "buffer.h"
#include "integers.h"
#include "kernels.h"

namespace {

// Tokens of a part of a context. Independent of the number of threads, so that a result depends
// neither on the machine nor on the rest of the batch. Only decodes are split: a prompt chunk has
// enough rows.
constexpr int64_t kPart = 512;

struct Unit {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_row, num_rows;  // rows of the sequence's query matrix
  int64_t first_key, last_key;
  float *partial;  // where to store a part's state; null: the unit is not split
  int64_t parts;   // number of parts in the first part's unit; 0 in the others
};

inline bool is_decode(const tw_attention &a, int64_t sequence) {
  return a.query_starts[sequence + 1] - a.query_starts[sequence] == 1;
}

thread_local Buffer unit_buffer;
thread_local Buffer partial_buffer;

struct Plan {
  const Unit *units;
  int64_t num_units, num_decodes;
  bool is_cut;  // whether some unit is split into parts
};

// Returns the number of parts of a sequence's context.
inline int64_t count_parts(const tw_attention &a, int64_t sequence) {
  return is_decode(a, sequence) ? divide_up(a.context_lengths[sequence], kPart) : 1;
}

// Lists the step's units. A chunk's last rows see most keys and come first, so that no long unit is
// left for the end. most_rows: of a unit; aligned: keys of which a unit's first is a multiple.
inline Plan plan(const tw_attention &a, int64_t leading, int64_t part_size, int64_t most_rows,
                 int64_t aligned) {
  int64_t num_units = 0, num_parts = 0;
  for (int64_t s = 0; s < a.sequences; s++) {
    int64_t rows = (a.query_starts[s + 1] - a.query_starts[s]) * a.group, parts = count_parts(a, s);
    int64_t units = divide_up(rows, most_rows) * a.num_kv_heads * parts;
    num_units += units;
    if (parts > 1) num_parts += units;
  }
  auto units = static_cast<Unit *>(
      unit_buffer.reserve(num_units * static_cast<int64_t>(sizeof(Unit))));
  auto partial = static_cast<float *>(
      partial_buffer.reserve(num_parts * part_size * static_cast<int64_t>(sizeof(float))));
  Unit *unit = units;
  int64_t num_decodes = 0;
  for (int64_t s = 0; s < a.sequences; s++) {
    int64_t length = a.query_starts[s + 1] - a.query_starts[s], rows = length * a.group;
    int64_t context = a.context_lengths[s], parts = count_parts(a, s);
    for (int64_t h = 0; h < a.num_kv_heads; h++)
      for (int64_t block = divide_up(rows, most_rows) - 1; block >= 0; block--) {
        int64_t row = block * most_rows, count = smaller(most_rows, rows - row);
        int64_t lowest = context - length + row / a.group;
        int64_t newest = (row + count - 1) / a.group;
        int64_t end = a.ends ? a.ends[a.query_starts[s] + newest] : context - length + newest + 1;
        int64_t seen = a.window ? larger(lowest + 1 - a.window, 0) / aligned * aligned : 0;
        for (int64_t part = 0; part < parts; part++) {
          int64_t first = larger(part * kPart, seen);
          // Rows that a window keeps from all visible keys have none: not a negative number.
          int64_t last = parts > 1 ? smaller((part + 1) * kPart, context) : larger(end, first);
          float *state = parts > 1 ? partial : nullptr;
          *unit++ = {s, h, row, count, first, last, state, part ? 0 : parts};
          if (state) partial += part_size;
        }
      }
    if (s < leading) num_decodes = unit - units;
  }
  return {units, num_units, num_decodes, num_parts > 0};
}

}  // namespace
