// C interface of the CPU kernels, loaded with ctypes.
//
// Tensors are row-major and contiguous unless a stride is given; strides and sizes count elements.
#pragma once

#include <cstdint>

extern "C" {

enum tw_dtype : int32_t { TW_FLOAT32 = 0, TW_BFLOAT16 = 1, TW_FLOAT16 = 2, TW_SCALED_INT8 = 3 };

// Instruction sets, each with all before it.
enum tw_instructions : int32_t {
  TW_BASELINE = 0,
  TW_AVX2 = 1,         // and FMA and F16C
  TW_NEON = 1,         // of aarch64, in the place of AVX2
  TW_AVX512 = 2,       // F, BW, VL, DQ
  TW_AVX512_BF16 = 3,  // and VBMI and VNNI
  TW_AMX = 4,          // bf16 and int8, and AVX-512 FP16
};

// Returns the best compiled-in instruction set that the processor and the operating system allow.
int32_t tw_instruction_set();

// Limits calls to this instruction set, for tests. Returns the one in use.
int32_t tw_limit_instruction_set(int32_t highest);

// From now on runs loops on a pool of `threads` threads instead of OpenMP's, which torch shares. 0
// returns to OpenMP's.
void tw_use_pool(int64_t threads);

// ---- float32 and bfloat16, any instruction set ----

// RMSNorms of rows, of each of their heads by itself.
struct tw_row_norm {
  const void *rows;    // [num_rows, heads, width]
  const void *weight;  // [width]
  void *out;           // [num_rows, heads, width]
  int64_t num_rows;
  int64_t heads;
  int64_t width;
  int64_t row_stride;  // numbers between two rows, of `rows` and of `out`
  float epsilon;
  int32_t adds;  // whether out += norm, rounded to dtype first; else out = norm
  int32_t dtype;
};
void tw_norm_rows(const tw_row_norm *norm);

// Multiplies rows by a factor, and bounds the products. 0 clears them, whatever they hold.
struct tw_scale {
  void *rows;  // [num_rows, width]
  int64_t num_rows;
  int64_t width;
  float factor;
  float limit;  // largest size of a product; infinity: unlimited
  int32_t dtype;
};
void tw_scale_rows(const tw_scale *scale);

// Applies RoPE to queries and keys in place, after an RMSNorm of each head if a norm is not null.
struct tw_rotation {
  void *heads;  // [tokens, num_query_heads + num_key_heads, head_dim], queries first
  int64_t row_stride;
  const float *cosines;  // [tokens, head_dim / 2]
  const float *sines;
  const void *query_norm;  // [head_dim] or null
  const void *key_norm;
  int64_t tokens;
  int64_t num_query_heads;
  int64_t num_key_heads;
  int64_t head_dim;
  float epsilon;
  int32_t dtype;
};
void tw_rotate(const tw_rotation *rotation);

// SiLU of a row's first half times its second half, or GELU with tanh, or the TW_GATE_CLAMPED of both.
struct tw_gate {
  const void *both;  // [num_rows, 2 * width]; null = what a product wrote last to null in this thread
  void *out;         // [num_rows, width]
  int64_t num_rows;
  int64_t width;
  int64_t out_stride;
  float alpha, limit;  // of TW_GATE_CLAMPED; a limit of 0: SiLU or GELU
  int32_t is_gelu;
  int32_t dtype;
};
void tw_gate_rows(const tw_gate *gate);

enum tw_arrangement : int32_t {
  TW_COPY = 0,
  TW_MULTIPLY = 1,
  TW_MULTIPLY_BY_SIGMOID = 2,
  TW_MULTIPLY_BY_SOFTPLUS = 3,  // log(1 + e^x)
  TW_ADD_ROWS = 4,
};

// Copies rows to the layout that products read, or multiplies what lies there by them or by a
// function of them, or adds them to it.
struct tw_arrange {
  const void *rows;  // [num_rows, width / columns]
  void *out;         // [num_rows, width], row by row or as a tiled activation
  int64_t num_rows;
  int64_t width;
  int64_t columns;  // neighbouring columns of `out` that a number of `rows` multiplies; 1 for TW_COPY
                    // and TW_MULTIPLY; with tiles 1 or a multiple of 32
  int64_t row_stride;  // numbers between two rows
  int32_t is_tiled;    // `out` is in blocks of 32 rows by 32 columns, and width a multiple of 32
  int32_t arrangement;
  int32_t dtype;
};
void tw_arrange_rows(const tw_arrange *arrange);

// What an adapter adds to some neighbouring outputs of a product.
struct tw_low_rank {
  const void *down;  // [rank, inputs]
  const void *bias;  // [rank] or null
  const void *up;    // [rank, outputs]
  int64_t rank;
  int64_t first;  // of the outputs
  int64_t outputs;
};

// Adds up^T (down row + bias) of each row's adapter to the row's outputs.
struct tw_adapt {
  const void *rows;  // [num_rows, inputs]
  void *out;         // [num_rows, outputs]
  const int32_t *owners;  // [num_rows], number of the row's adapter; 0 and unknown numbers add nothing
  const tw_low_rank *parts;
  const int32_t *starts;  // [num_numbers + 1], first part of each number
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;
  int64_t out_stride;
  int64_t most_rank;  // of all parts of one number together
  int64_t num_numbers;
  int32_t dtype;
};
void tw_adapt_rows(const tw_adapt *adapt);

// Rule by which scores choose a row's experts and weigh them.
struct tw_routing {
  const float *bias;  // [experts], added to the weights for the choice alone; or null
  const float *factors;  // [experts], by which the weights of chosen experts are multiplied; or null
  int64_t experts;
  int64_t per_row;
  int64_t groups;       // of neighbouring experts
  int64_t kept_groups;  // groups among which a row's experts are chosen
  int64_t group_leaders;  // best experts of a group whose weights together rank it
  float least_sum;      // by which normalized weights are divided
  float scale;          // of all weights
  float jitter;         // half the relative distance within which SparseMixer weighs experts
  int32_t is_sparse;    // whether SparseMixer chooses; the other rules then have no effect
  int32_t has_sigmoids;  // whether weights are sigmoids of the scores, else parts of a softmax
  int32_t is_normalized;  // whether a row's weights are divided by their sum
};

// Writes each row's experts, the highest weights first and equals by number, and their weights:
// [num_rows, per_row] each. scores: [num_rows, experts]. A NaN is above all numbers.
void tw_choose_experts(const tw_routing *routing, const float *scores, int64_t num_rows,
                       int64_t *chosen, float *weights);

// Moves the kept rows to the front, in place. Stride and size are in bytes.
struct tw_keep {
  void *rows;
  const int64_t *kept;  // [num_kept] ascending; null: all rows stay in place
  int64_t num_kept;
  int64_t row_stride;
  int64_t row_bytes;
};
void tw_keep_rows(const tw_keep *keep);

// One layer's attention. row_stride is that of queries, keys and values.
struct tw_attention {
  const void *queries;  // [query_starts[sequences], num_kv_heads * group, head_dim]
  const void *keys;     // [tokens, num_kv_heads, head_dim]; null: there are no tokens to write
  const void *values;   // [tokens, num_kv_heads, value_dim]
  void *out;                     // [query_starts[sequences], num_kv_heads * group * value_dim]
  void *key_cache;               // [blocks, num_kv_heads, …], as the kernel says
  void *value_cache;             // the same
  const int64_t *slots;          // [tokens]
  const int32_t *query_starts;   // [sequences + 1]
  const int32_t *context_lengths;  // [sequences]
  const int32_t *block_tables;   // [sequences, table_stride]
  const float *sinks;  // [num_kv_heads * group] extra logits of the softmax without values, or null
  // [num_kv_heads * group] what a score loses for each token between its query and an earlier key
  // (ALiBi), or null
  const float *slopes;
  // [query_starts[sequences]] index after the last key that a query sees, rising within a sequence;
  // null: each query sees the keys up to its own.
  const int32_t *ends;
  int64_t row_stride;
  int64_t table_stride;
  int64_t tokens;
  int64_t sequences;  // sequences to attend for; keys and values of all tokens are written
  int64_t num_kv_heads;
  int64_t group;  // query heads that share a key head
  int64_t head_dim;   // of queries and keys
  int64_t value_dim;  // of values and outputs
  int64_t block_size;
  int64_t window;  // latest tokens that a query sees; 0: all
  int64_t cache_group;  // index of the layer's tables among those of a pass
  float scale;
  float cap;  // soft cap: scores become cap * tanh(score / cap); 0: none
  int32_t dtype;        // of queries, keys, values and out: TW_FLOAT32 or TW_BFLOAT16
  int32_t cache_dtype;  // tw_paged_attend only: any tw_dtype
  int32_t is_tiled;     // tw_paged_attend only: whether out is in tiles
};

// Writes keys and values, then attends for the queries of all sequences, on any processor.
// A block's head is runs of 16 tokens, the last one of fewer if block_size is no multiple of 16:
// keys are [width, 16] and values [16, width], where width is head_dim or value_dim rounded up to a
// multiple of 16; with TW_SCALED_INT8, the 16 scales of the tokens follow, in float32.
void tw_paged_attend(const tw_attention *attention);

// One layer's latent attention, for decodes. A token's latent and its key's shared part are side by
// side.
struct tw_latent {
  const void *queries;  // [sequences, heads * (key_width + shared_width)]: own parts, shared parts
  const void *latents;  // [tokens, latent_width + shared_width]; null: `pages` have them already
  const void *keys;     // [heads, key_width, latent_width]
  const void *values;   // [heads, value_width, latent_width]
  void *out;            // [sequences, heads * value_width]
  void *pages;          // [blocks, block_size, page_width], the latents of each token first
  const int64_t *slots;            // [tokens]
  const int32_t *context_lengths;  // [sequences]
  const int32_t *block_tables;     // [sequences, table_stride]
  int64_t table_stride;
  int64_t tokens;
  int64_t sequences;  // to attend for: the first ones; latents of all tokens are written
  int64_t heads;
  int64_t latent_width;
  int64_t key_width;
  int64_t shared_width;
  int64_t value_width;
  int64_t page_width;
  int64_t block_size;
  int64_t cache_group;  // as in tw_attention
  float scale;
  int32_t dtype;
};

// Writes latents, then attends for `sequences` sequences of one query token each.
void tw_latent_decode(const tw_latent *latent);

// One layer's gated delta rule, with its convolution before and its gated norm behind it. Strides
// are those between tokens.
struct tw_delta {
  const void *mixed;  // [tokens, channels]: queries and keys of key heads, values of value heads
  const void *gate;   // [tokens, value_heads * value_dim]
  const void *beta;   // [tokens, value_heads]
  const void *decay;  // [tokens, value_heads], or [tokens, value_heads * key_dim] of channels
  void *out;          // [tokens, value_heads * value_dim]
  const float *convolution;       // [conv_width, channels]
  const float *convolution_bias;  // [channels] or null
  const float *rates;             // [value_heads]
  const float *decay_bias;        // as many as a token's decays
  const float *norm;              // [value_dim]
  void *windows;                  // [slots, conv_width - 1, channels] in dtype
  void *recurrent;                // [slots, value_heads, key_dim, value_dim] in state_dtype
  const int32_t *starts;          // [runs + 1], first token of each run
  const int32_t *sources;         // [runs], slot that a run reads; negative: zeros
  const int32_t *targets;         // [runs], slot that a run writes
  int64_t runs;
  int64_t mixed_stride;
  int64_t gate_stride;
  int64_t beta_stride;
  int64_t decay_stride;
  int64_t out_stride;
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t conv_width;
  float epsilon;
  float least_decay;  // bound of decays' logarithms, below 0; 0: decays are not bounded
  int32_t is_silu;  // whether the output is times silu(gate), else times sigmoid(gate)
  int32_t decays_channels;
  int32_t doubles_beta;
  int32_t dtype;  // TW_FLOAT32 or TW_BFLOAT16
  int32_t state_dtype;
};
void tw_delta_rule(const tw_delta *delta);

// One layer's state space scan (Mamba-2), with its convolution before and its gated norm behind it.
// Strides are those between tokens.
struct tw_scan {
  const void *gate;   // [tokens, heads * head_dim]
  const void *mixed;  // [tokens, channels]: inputs of heads, then the factors (B, C) of groups
  const void *steps;  // [tokens, heads]
  void *out;          // [tokens, heads * head_dim]; null: `scanned` is the result
  float *convolved;   // [tokens, channels]
  float *scanned;     // [tokens, heads * head_dim]
  const float *convolution;       // [conv_width, channels]
  const float *convolution_bias;  // [channels] or null
  const float *rates;             // [heads]
  const float *step_bias;         // [heads]
  const float *skip;              // [heads]
  const float *norm;              // [heads * head_dim]; null: there is the gate alone
  void *windows;                  // [slots, conv_width - 1, channels] in dtype
  void *states;                   // [slots, heads, state_width, head_dim] in state_dtype
  const int32_t *starts;          // starts, sources and targets as in tw_delta
  const int32_t *sources;
  const int32_t *targets;
  int64_t runs;
  int64_t gate_stride;
  int64_t mixed_stride;
  int64_t steps_stride;
  int64_t out_stride;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_width;
  int64_t conv_width;
  int64_t norm_width;  // outputs that are normed together
  float epsilon;
  float least_step;
  float most_step;
  int32_t norms_first;  // whether the norm is that of outputs before the gate
  int32_t dtype;        // TW_FLOAT32 or TW_BFLOAT16
  int32_t state_dtype;
};
void tw_state_scan(const tw_scan *scan);

// One layer's selective scan (Mamba) and the convolution before it. Between the two stages, products
// of `convolved` make `steps`, `opened` and `closed`. Strides are those between tokens.
struct tw_selective {
  const void *mixed;              // [tokens, channels]
  void *convolved;                // [tokens, channels], contiguous as all that follows without stride
  const void *gate;               // [tokens, channels]
  const void *steps;              // [tokens, channels]
  const float *opened;            // [tokens, state_width], factors of the inputs (B)
  const float *closed;            // [tokens, state_width], factors of the outputs (C)
  void *out;                      // [tokens, channels]
  const float *convolution;       // [conv_width, channels]
  const float *convolution_bias;  // [channels] or null
  const float *rates;             // [state_width, channels]
  const float *step_bias;         // [channels]
  const float *skip;              // [channels]
  void *windows;                  // [slots, conv_width - 1, channels] in dtype
  void *states;                   // [slots, state_width, channels] in state_dtype
  const int32_t *starts;          // starts, sources and targets as in tw_delta
  const int32_t *sources;
  const int32_t *targets;
  int64_t runs;
  int64_t mixed_stride;
  int64_t gate_stride;
  int64_t channels;
  int64_t state_width;
  int64_t conv_width;
  int32_t dtype;  // TW_FLOAT32 or TW_BFLOAT16
  int32_t state_dtype;
};

// Fills `convolved`, and the targets' windows.
void tw_selective_convolve(const tw_selective *scan);

// Fills `out`, and the targets' states.
void tw_selective_scan(const tw_selective *scan);

// One draw from a row of logits, in which a token's weight is e^(logit / temperature).
struct tw_draw {
  const float *logits;  // [vocabulary]
  double temperature;   // above 0
  double top_p;
  double min_p;
  double noise;  // in [0, 1): share of the total weight at which the drawn token lies
  int64_t top_k;  // 0: all
  int64_t drawn;  // the result
};

// Draws from the tokens that top_k, then top_p, then min_p leave. Weights are summed in descending
// order of logits, equal logits by id; without limits (0, 1 and 0), in the order of ids.
void tw_draw_tokens(tw_draw *draws, int64_t count, int64_t vocabulary);

// Log-probability and rank of a token in a row of logits, and the most likely tokens.
struct tw_score {
  const float *logits;  // [vocabulary]
  int64_t id;
  int64_t *top_ids;     // [width], most likely first, equals by id
  float *top_logprobs;  // [width]
  int64_t rank;         // 1 + the number of more likely tokens
  float logprob;
};
void tw_score_tokens(tw_score *scores, int64_t count, int64_t vocabulary, int64_t width);

// How scales and offsets of groups are stored.
enum {
  TW_FLOATS = 0,  // float32
  TW_HALVES = 1,  // float16
  TW_LEVELS = 2,  // int8, times a float16 factor for each 256 inputs of an output
  TW_EXPONENTS = 3,  // uint8: 2 ** (n - 127), and 0 for n = 0; for codes that number values
};

// Bits of a block's codes: each `run` bytes hold the lowest `bits` bits of `run` codes, then those of
// the next `run` codes, and so on.
struct tw_plane {
  int64_t first;  // byte of the block
  int64_t bytes;
  int64_t run;
  int32_t bits;   // 1, 2, 4 or 8
  int32_t shift;  // of the bits in the code
};

// Codes [outputs, inputs], a byte each or in the blocks of a file.
struct tw_codes {
  const uint8_t *rows;
  int64_t row_bytes;       // between two outputs
  const int64_t *order;    // [outputs], the row of each output; null = in order
  const tw_plane *planes;  // null = a byte each
  int64_t num_planes;
  int64_t block_bytes;
  int64_t block_codes;
  int64_t lift;            // to add to the codes in the blocks, modulo 256
};

// How a block holds the scales, and perhaps offsets, of its groups. Names are those of ggml's types.
enum {
  TW_SCALE_NUMBERS = 0,     // float16
  TW_SCALE_AND_OFFSET_NUMBERS = 1,  // float16 each
  TW_Q2_K_NUMBERS = 2,
  TW_Q3_K_NUMBERS = 3,
  TW_Q4_K_NUMBERS = 4,  // those of Q5_K too
  TW_Q6_K_NUMBERS = 5,
  TW_IQ4_XS_NUMBERS = 6,
  TW_EXPONENT = 7,  // uint8, of doubled codes: 2 ** (n - 128), and 0 for n = 0
};

// A weight in the blocks of a mapped file.
struct tw_blocks {
  tw_codes codes;
  const uint8_t *numbers;  // of the first row's first block
  int64_t number_row_bytes;    // between two rows
  int64_t number_block_bytes;  // between two blocks of a row
  int64_t outputs;
  int64_t num_rows;  // that the outputs are of
  int32_t form;   // of the numbers
  float factor;   // on scales and offsets
};

// Weights of one shape that are multiplied at once, one after the other or with their tiles (16
// outputs) in turn.
struct tw_mapped {
  const tw_blocks *weights;  // all but the last have whole strips
  int64_t count;
  int32_t alternate;
};

// Product with weights in groups: weight [o, i] is scale * code + offset, with a scale and an offset
// for each output and each group of inputs, or scale * values[code]. Rows are rounded to 8 bits, with
// a scale for each 32.
struct tw_grouped {
  const void *rows;    // [num_rows, inputs]
  const void *packed;  // by tw_grouped_pack; null: `mapped`
  const tw_mapped *mapped;  // weights in the blocks of a file, with numbers in TW_FLOATS; else null
  const float *bias;   // [outputs] or null
  void *out;           // [num_rows, out_stride]; null = memory that tw_gate_rows reads
  int64_t first_strip;  // 8 outputs each, of the weights that are multiplied
  int64_t num_rows;
  int64_t inputs;   // a multiple of 32 and of group; of 256 with levels
  int64_t outputs;
  int64_t first_output; // of a row of out
  int64_t out_stride;   // elements between two rows of out
  int64_t group;        // inputs: a multiple of 32, or 16
  int32_t bits;         // 4, 6 or 8: codes are below 2 ** bits
  int32_t numbers;      // TW_FLOATS, TW_HALVES, TW_LEVELS or TW_EXPONENTS
  int32_t has_offsets;  // if not, offsets are -scale * 2 ** (bits - 1)
  int32_t has_values;   // whether codes, of 4 bits without offsets, number `values`
  int32_t adds;         // whether out += product, else out = product
  int32_t dtype;        // of rows: TW_FLOAT32 or TW_BFLOAT16
  int32_t out_dtype;    // likewise
  int8_t values[16];    // -127 to 127
};
void tw_grouped_linear(const tw_grouped *grouped);

// Bytes of packed weights. Reads only the fields that describe weights.
int64_t tw_grouped_bytes(const tw_grouped *grouped);

// Scales or offsets of groups.
struct tw_numbers {
  const void *each;         // [outputs, inputs / group]
  const uint16_t *factors;  // float16 [outputs, inputs / 256] of levels, else null
};

// Packs strips `first` to first + count - 1 of mapped weights; zeros where outputs end.
void tw_pack_mapped(const tw_grouped *grouped, int64_t first, int64_t count, uint8_t *packed);

// Has the system read the pages of mapped weights that are not in memory, without waiting for them.
void tw_prefetch_mapped(const tw_grouped *grouped);

// Packs codes into the tile columns (16 outputs) first_tile, first_tile + tile_step, ... With 8 bits,
// offsets must be those of codes less 128.
void tw_grouped_pack(const tw_grouped *grouped, const tw_codes *codes, const tw_numbers *scales,
                     const tw_numbers *offsets, uint8_t *packed, int64_t first_tile,
                     int64_t tile_step);

// ---- float32 and bfloat16 rows, weights in floating point, any instruction set ----

// Product with weights [outputs, inputs] as they are stored. They are widened to float32, in which
// products are summed in the order of the inputs.
struct tw_float_product {
  const void *rows;    // [num_rows, inputs]
  const void *packed;  // by tw_float_pack
  const float *bias;   // [outputs] or null
  void *out;           // [num_rows, out_stride]; null = memory that tw_gate_rows reads
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;
  int64_t out_stride;    // elements between two rows of out
  int32_t adds;          // whether out += product, else out = product
  int32_t weight_dtype;  // any
  int32_t dtype;         // of rows: TW_FLOAT32 or TW_BFLOAT16
  int32_t out_dtype;     // likewise
};
void tw_float_linear(const tw_float_product *product);

// Numbers of a packed weight.
int64_t tw_float_packed_elements(int64_t outputs, int64_t inputs);

// Packs a weight of any dtype. row_stride: elements between two outputs.
void tw_float_pack(int32_t dtype, const void *weight, int64_t row_stride, void *packed,
                   int64_t outputs, int64_t inputs);

// ---- bfloat16 in tiles, from TW_AVX512_BF16 on ----

// Inputs of products are in tiles: [rows / 32][width / 32] blocks of [32][32] elements. The width
// is a multiple of 32; padding rows may hold anything.

// RMSNorm of rows [num_rows, width] into tiles.
struct tw_norm {
  const void *rows;
  const void *weight;
  void *tiles;
  int64_t num_rows;
  int64_t width;
  float epsilon;
};
void tw_tiled_rms_norm(const tw_norm *norm);

// LayerNorm of rows [num_rows, width] into tiles, and in place too if `replaces`.
struct tw_layer_norm {
  void *rows;
  const void *weight;  // [width]
  const void *bias;    // [width]
  void *tiles;
  int64_t num_rows;
  int64_t width;
  float epsilon;
  int32_t replaces;
};
void tw_tiled_layer_norm(const tw_layer_norm *norm);

// Weights are packed in tiles of 16 outputs by 32 inputs in TDPBF16PS's layout (pairs of inputs
// interleaved). A panel is two columns of tiles side by side: 32 neighbouring outputs.
int64_t tw_tiled_packed_elements(int64_t outputs, int64_t inputs);

// Packs weight [outputs, inputs] into the tile columns first_tile, first_tile + tile_step, ...
void tw_tiled_pack(int32_t dtype, const void *weight, void *packed, int64_t outputs, int64_t inputs,
                 int64_t first_tile, int64_t tile_step);

// The same with weights rounded to int8, -127 to 127, in one byte per packed element. Writes a
// scale for each output to `scales`, which has one per packed column, and leaves padding untouched.
void tw_tiled_pack_int8(int32_t dtype, const void *weight, void *packed, float *scales,
                      int64_t outputs, int64_t inputs, int64_t first_tile, int64_t tile_step);

// Packs int8 weights [outputs, inputs] likewise, four inputs interleaved in TDPBSSD's layout: tiles of
// 16 outputs by 64 inputs. inputs: a multiple of 64.
void tw_tiled_pack_bytes(const int8_t *weight, void *packed, int64_t outputs, int64_t inputs,
                         int64_t first_tile, int64_t tile_step);

// Compresses packed weights without loss to 12.5 bits each or little more (coded.h). Returns the
// bytes needed; if they exceed `capacity` (at least 12.5 bits per element), the output is invalid.
// Returns -1 if decoding these weights would take longer than reading them uncompressed.
int64_t tw_tiled_code(const void *packed, int64_t elements, void *coded, int64_t capacity);

enum tw_epilogue : int32_t {
  TW_STORE = 0,          // out = product
  TW_ADD = 1,            // out += product
  TW_GATE = 2,           // out = silu(even tiles) * odd tiles, in tiles
  TW_STORE_FLOAT32 = 3,  // out is float32
  TW_ARGMAX = 4,         // out is int64 [num_rows]: each row's largest column, the first of equals;
                         // -1 if none is above minus infinity
  TW_GELU = 5,           // out = gelu(product), in tiles
  TW_GELU_TANH = 6,      // the same with tanh in place of erf
  TW_GATE_GELU = 7,      // out = gelu(even tiles) * odd tiles, in tiles
  TW_GATE_GELU_TANH = 8,
  TW_GATE_CLAMPED = 9,  // out = x * sigmoid(alpha * x) * (y + 1), in tiles, where x are the even tiles
                        // up to `limit`, y the odd tiles between -limit and limit
};

enum tw_format : int32_t {
  TW_PACKED = 0,  // by tw_tiled_pack
  TW_INT8 = 1,    // by tw_tiled_pack_int8, with scales
  TW_CODED = 2,   // by tw_tiled_code
  TW_GROUPS = 3,  // by tw_grouped_pack, with zeros after the last output to a whole panel
  TW_BYTES = 4,   // by tw_tiled_pack_bytes, with scales: rows are rounded to int8 too
};

struct tw_linear {
  const void *rows;          // bfloat16 [num_rows, inputs] in tiles
  const void *packed;        // weights in `format`
  const float *scales;       // one per packed column for TW_INT8 and TW_BYTES, otherwise null
  const float *bias;         // one per packed column, or null
  const tw_grouped *groups;  // description of the weights for TW_GROUPS
  void *out;                 // [num_rows, out_stride]; half as many columns after a gate
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;     // columns of the product, before a gate halves them
  int64_t out_stride;  // elements between two rows of out, if it is not in tiles
  int64_t first_panel;  // of the panels to compute
  int64_t last_panel;   // the one after them; 0: all
  int32_t epilogue;
  int32_t format;
  float alpha, limit;  // of TW_GATE_CLAMPED
};
void tw_tiled_linear(const tw_linear *linear);

// Writes keys and values, then attends for decodes and prompt chunks; out is in tiles. If there are
// fewer queries than tokens, they belong to each sequence's last tokens.
// A cached block holds its keys as [block_size / 16][head_dim / 32] tiles and its values as
// [block_size / 32][value_dim / 16] tiles, pairs of 32 tokens in the order 0 1 8 9 2 3 10 11 etc.
// block_size, head_dim and value_dim are multiples of 32.
void tw_tiled_attend(const tw_attention *attention);

// Products of one expert with weights in groups, on rows row by row.
struct tw_grouped_expert {
  tw_grouped gate, up, down;
};

// The same with weights in floating point; the outputs of `gate` are whole panels (32).
struct tw_float_expert {
  tw_float_product gate, up, down;
};

// A mixture of experts: adds to `out` each row's sum of its experts' outputs, times their factors.
// The sum is in the order of the experts' numbers, so that it is independent of the other rows.
// Experts are those of `gates` and `downs`, from TW_AVX512_BF16 on, of `grouped`, or of `floats`.
struct tw_mixture {
  const void *rows;       // [num_rows, inputs], in tiles for `gates`
  void *out;              // [num_rows, outputs]
  // [num_rows, per_row], different in a row; null: by `routing`. Numbers from `experts` on are those
  // of experts without weights, which return the row.
  const int64_t *chosen;
  const float *factors;   // [num_rows, per_row]; null: by `routing`
  const void *router_rows;        // [num_rows, inputs] in tiles, what `router` reads; null: `rows`
  const tw_linear *router;        // to the scores by which `routing` chooses
  const tw_routing *routing;
  const tw_linear *shared_router;  // to the logit of the shared expert's factor; null: it is 1
  const tw_linear *gates;  // [experts + 1 if has_shared] with their epilogues; the shared one is last
  const tw_linear *downs;
  const tw_grouped_expert *grouped;  // [experts]
  const tw_float_expert *floats;     // [experts]
  int64_t num_rows;
  int64_t inputs;
  int64_t outputs;
  int64_t experts;
  int64_t per_row;
  float alpha, limit;  // of the activation of `grouped` or `floats`, as in tw_gate
  int32_t is_gelu;     // likewise
  int32_t has_shared;  // whether every row has one more expert
  int32_t dtype;       // of rows
  int32_t out_dtype;
};
void tw_mix_experts(const tw_mixture *mixture);

// Kernels of a recorded pass through a model's layers. Replaying it avoids calls from Python, each
// of which takes as long as a small kernel.
enum tw_kernel : int32_t {
  TW_NORM = 0,
  TW_LINEAR = 1,
  TW_ROTATION = 2,
  TW_ATTENTION = 3,
  TW_KEEP = 4,  // later kernels run on the kept rows
  TW_ROW_NORM = 5,
  TW_GROUPED_LINEAR = 6,
  TW_GATE_ROWS = 7,
  TW_PAGED_ATTENTION = 8,
  TW_DELTA_RULE = 9,
  TW_ARRANGE = 10,
  TW_MIXTURE = 11,
  TW_STATE_SCAN = 12,
  TW_SCALE = 13,
  TW_FLOAT_LINEAR = 14,
  TW_LATENT_DECODE = 15,
};

union tw_call {
  tw_norm norm;
  tw_linear linear;
  tw_rotation rotation;
  tw_attention attention;
  tw_keep keep;
  tw_row_norm row_norm;
  tw_grouped grouped_linear;
  tw_gate gate_rows;
  tw_attention paged_attention;
  tw_delta delta_rule;
  tw_arrange arrange;
  tw_mixture mixture;
  tw_scan state_scan;
  tw_scale scale;
  tw_float_product float_linear;
  tw_latent latent_decode;
};

struct tw_operation {
  int32_t kernel;
  tw_call call;
};

// Places of a pass's tokens in the layers of one cache group.
struct tw_tables {
  const int64_t *slots;
  const int32_t *block_tables;
  int64_t table_stride;
  const int32_t *ends;       // as in tw_attention
  const int32_t *kept_ends;  // ends after TW_KEEP
};

// Arguments that differ between passes; they replace the operations' fields of the same names.
struct tw_pass {
  const tw_tables *tables;  // by cache group
  const int32_t *query_starts;
  const int32_t *context_lengths;
  const int64_t *kept;         // null: all rows are kept
  const int32_t *kept_starts;  // query_starts after TW_KEEP
  const int32_t *state_starts;   // starts, sources and targets of tw_delta; null: no such kernel
  const int32_t *state_sources;
  const int32_t *state_targets;
  int64_t tokens;
  int64_t sequences;
  int64_t num_kept;
  int64_t state_runs;
  double *seconds;  // by tw_kernel, run times to add to; or null
};

// Runs the operations in order on the rows of this pass.
void tw_replay(const tw_operation *operations, int64_t count, const tw_pass *pass);
}
