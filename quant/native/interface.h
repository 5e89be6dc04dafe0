// The constants, enums and structs that Python hands to the library. This file is the only place where they stand:
// library.py reads it and makes ctypes' structures of it. It therefore has one field a line, `type name;` or
// `type name[COUNT];`, and comments with `//` alone. Addresses are those of contiguous memory that outlives the call.
#ifndef MOEDGE_INTERFACE_H
#define MOEDGE_INTERFACE_H

#include <stdint.h>

// Instruction sets, from the least to the most: each has what those before it have.
enum moedge_set : int32_t {
    MOEDGE_NONE = 0,
    MOEDGE_AVX2 = 1,  // AVX2, FMA, F16C
    MOEDGE_AVX512 = 2,  // AVX-512 F, BW, VL, DQ
    MOEDGE_AVX512BF16 = 3,  // AVX-512 BF16 and VNNI
    MOEDGE_AMX = 4,  // AMX TILE, INT8 and BF16, which attention alone has code for
};

// Formats of the KV cache (quant/kv/format.py), and of activations.
enum moedge_format : int32_t { MOEDGE_FP32, MOEDGE_BF16, MOEDGE_FP16, MOEDGE_INT8, MOEDGE_INT4 };

// Types of codes that lie in order `tiles` (formats/format.py), and floats in order `rows`, of which AVX2 alone is for BF16.
enum class moedge_codes : int32_t { INT4, NF4, E2M1, INT3, VQ2, INT8, BF16 };

// Scales of groups: of a dtype, a power of two as a biased exponent (UINT8), or a scale and a zero in sixteenths of it,
// bytes both, which are multiplied by the factor of their row.
enum class moedge_scales : int32_t { BFLOAT16, FLOAT16, FLOAT32, UINT8, PAIRS };

// Activations of gated experts (kernels/operands.py).
enum class moedge_activation : int32_t { SILU, GELU_TANH, CLAMPED_SWIGLU };

// Formats that matrices are quantized to, and the orders in which their codes are written (formats/format.py).
enum class moedge_weight_format : int32_t { NF4, INT4, MXFP4, INT8, INT3, VQ2 };
enum class moedge_order : int32_t { ROWS, TILES };

// Types of GGUF's blocks that are dequantized by the library (gguf/constants.py has all of them), and bytes by a table.
enum class moedge_block_type : int32_t {
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, BYTE
};

// What a step of a decoder layer computes; the struct of its arguments is named beside it.
enum class moedge_kind : int32_t {
    MULTIPLY,  // moedge_product
    EXPERTS,  // moedge_mixture
    NORM,  // moedge_norm
    HEADS,  // moedge_heads
    GATE,  // moedge_gating
    ROUTER,  // moedge_router
    CHOOSE,  // moedge_choice
    GROUP,  // moedge_grouping
    COMBINE,  // moedge_combination
    ATTEND,  // moedge_attention_step
    REDUCE,  // moedge_attention_step
};

enum {
    MOEDGE_SPLIT = 256,  // positions of a row's past that are added up before they are added to others
    MOEDGE_ROWS = 8,  // rows of attention that one call computes together
    MOEDGE_KEY_PARTS = 2,
    MOEDGE_MOST_ROWS = 128,  // rows that products with matrices in order `tiles` compute together
    MOEDGE_FEW_ROWS = 32,  // rows that products with matrices in order `rows` compute together
    MOEDGE_ROW_GROUPS = 1024,  // scales of a row of such a matrix, at most
    MOEDGE_COUNTERS = 16,  // of a product that runs alone
    MOEDGE_STEP_COUNTERS = 32,
};

// One layer's keys or values in the cache: planes as KVPool.planes gives them.
struct moedge_vectors {
    const uint8_t *codes;  // [blocks, H, N, bytes of a vector]
    const uint16_t *scales;  // float16 [blocks, H, groups, N]; null where the format has none
    const uint16_t *zeros;  // the same
    moedge_format format;
    int32_t width;  // elements of a vector
};

// Consecutive rows of one sequence: queries of tokens at `position` on, which are rows `row` on of the pass.
struct moedge_rows {
    int32_t table;  // the row of `tables`
    int32_t row;
    int32_t count;  // 1 to MOEDGE_ROWS
    int32_t position;
};

// Attention of rows over their cached keys and values. A row's past is cut at positions that are multiples of
// MOEDGE_SPLIT, and partial results are added up in that order, whoever computes them.
struct moedge_attention {
    moedge_vectors keys[MOEDGE_KEY_PARTS];  // a query has the elements of all parts, one after the other
    moedge_vectors values;
    int32_t num_parts;
    int32_t kv_heads;  // H
    int32_t group;  // query heads of one KV head
    int32_t block;  // N, tokens of a block
    int32_t window;  // a row attends to the last `window` tokens, itself included; 0: to all
    int32_t chunk;  // or to those since the start of its chunk of positions; 0: to all
    float scale;
    float softcap;  // 0: none
    const float *sinks;  // [Hq] or null
    const float *shift;  // [T, Hq], scaled, added to scores; or null
    const int32_t *tables;  // [sequences, table_width] block ids
    int64_t table_width;
    const moedge_rows *rows;  // [num_rows]
    const void *queries;  // [T, Hq, elements of all key parts]
    void *out;  // [T, Hq, width of values]
    moedge_format query_format;  // fp32, bf16 or fp16
    moedge_format out_format;
    int32_t exact;  // products in float32, also where formats have faster ones
    int32_t rotated;  // the first part of keys is stored rotated: queries have to be, by a Hadamard matrix
    int32_t num_pieces;  // of `pieces`; 0 where an item is a whole row of `rows` and a KV head
    const int32_t *pieces;  // [num_pieces, 2]: index in `rows`, number of the split; by row, splits ascending
    float *partials;  // [num_pieces * H, rows * group, width + 2]
    int64_t partial_stride;  // floats of a piece and KV head
};

// A matrix [rows, columns] in order `tiles`, or of BF16 in order `rows`, of whole tiles.
struct moedge_matrix {
    const uint8_t *codes;
    const uint8_t *scales;  // [rows, columns / group]
    const uint8_t *zeros;  // zero points, or null
    const float *factors;  // [rows] of PAIRS, or null
    int64_t rows;
    int64_t columns;
    int64_t group;  // columns that share a scale
    moedge_codes codes_type;
    moedge_scales scales_type;
};

// y [rows, N] = x [rows, K] times a matrix [N, K] transposed, plus its bias.
struct moedge_product {
    const uint16_t *x;
    int64_t x_stride;  // numbers from row to row
    uint16_t *y;
    int64_t y_stride;
    int64_t rows;
    char *scratch;  // scratch.row_nbytes(K) for each row
    int64_t *counters;  // [MOEDGE_COUNTERS], 0
    moedge_matrix weights;
    const uint16_t *bias;  // [N] or null
    int32_t integers;  // rows of x are rounded to integers of 8 bits, but for codes NF4
};

// An expert: down (activation (up x)), with biases or null.
struct moedge_expert {
    moedge_matrix up;
    moedge_matrix down;
    const uint16_t *up_bias;
    const uint16_t *down_bias;
};

// An expert and at most MOEDGE_MOST_ROWS of its rows.
struct moedge_job {
    int64_t first_row;
    int64_t rows;
    int64_t scratch_offset;
    moedge_expert expert;
};

// The rows of experts: out[r] = down (activation (up hidden[token_ids[r]])).
struct moedge_mixture {
    const uint16_t *hidden;
    int64_t hidden_stride;
    const int64_t *token_ids;
    uint16_t *out;
    int64_t out_stride;
    char *scratch;
    int64_t num_jobs;
    moedge_job *jobs;  // matrices of all jobs have the same shapes
    int64_t *counters;  // [MOEDGE_COUNTERS], 0
    moedge_activation activation;
    int32_t alternating;  // rows of `up` are pairs of gate and up, which alternate; else first all of gate
    int32_t integers;  // as of moedge_product
};

// A matrix [rows, columns] in order `rows`, of whole chunks of 32 columns.
struct moedge_row_matrix {
    const uint8_t *codes;  // or floats, of scales_type
    const uint8_t *scales;  // [rows, columns / group]; null: of floats
    const uint8_t *zeros;  // zero points, or null
    const float *factors;  // [rows] of PAIRS, or null
    int64_t rows;
    int64_t columns;
    int64_t group;  // columns that share a scale
    moedge_codes codes_type;
    moedge_scales scales_type;
};

// An expert in order `rows`, with biases of the mixture's format or null, and at most MOEDGE_FEW_ROWS of its rows.
struct moedge_row_job {
    int64_t first_row;
    int64_t rows;
    int64_t scratch_offset;  // floats: of MOEDGE_FEW_ROWS rows at most, each of all columns of both matrices
    moedge_row_matrix up;
    moedge_row_matrix down;
    const void *up_bias;
    const void *down_bias;
};

// The rows of experts in order `rows`: out[r] = down (activation (up hidden[token_ids[r]])).
struct moedge_row_mixture {
    const void *hidden;
    int64_t hidden_stride;
    const int64_t *token_ids;
    void *out;
    int64_t out_stride;
    float *scratch;
    int64_t num_jobs;
    const moedge_row_job *jobs;  // matrices of all jobs have the same shapes
    int64_t *counters;  // [MOEDGE_COUNTERS], 0
    moedge_format format;  // of hidden, biases and out: fp32, bf16 or fp16
    moedge_activation activation;
    int32_t alternating;  // as of moedge_mixture
};

// total = x + added, where `added` is not null; out = RMSNorm(total) * weight, or * (1 + weight). All [rows, columns].
struct moedge_norm {
    const uint16_t *x;
    const uint16_t *added;
    const uint16_t *weight;
    uint16_t *total;
    uint16_t *out;
    int64_t rows;
    int64_t columns;
    float eps;
    int32_t plus_one;
};

// Heads [rows, heads, dim] of queries or keys, and the RMSNorm of each where `weight` is not null.
struct moedge_head_rows {
    uint16_t *x;
    const uint16_t *weight;
    int64_t heads;
    float eps;
    int32_t plus_one;
};

// Norms and rotary embedding of queries and keys in place; then keys and values go into a cache of bfloat16, where
// `key_codes` is not null.
struct moedge_heads {
    int64_t rows;
    int64_t dim;
    int64_t rotary;  // the first elements of a head, which are rotated: halves against each other
    const uint16_t *cos;  // [rows, rotary]
    const uint16_t *sin;
    moedge_head_rows queries;
    moedge_head_rows keys;
    const uint16_t *values;  // [rows, heads of keys, dim]
    uint16_t *key_codes;  // [blocks, heads, block, dim]
    uint16_t *value_codes;
    const int64_t *slots;  // [rows]
    int64_t block;
};

// What a gated feed-forward block does to its first two products [rows, columns]: gate = activation(gate) * up.
struct moedge_gating {
    uint16_t *gate;
    const uint16_t *up;
    int64_t rows;
    int64_t columns;
    moedge_activation activation;
};

// Scores of experts: logits [rows, experts] = x [rows, columns] times weight [experts, columns] transposed.
struct moedge_router {
    const uint16_t *x;
    const uint16_t *weight;
    float *logits;
    int64_t rows;
    int64_t columns;
    int64_t experts;
};

// The experts of every row, by the largest logits, of equal ones the first: ids and weights [rows, chosen]. Weights are
// softmax over all experts, or with `normalised` over those that were chosen.
struct moedge_choice {
    const float *logits;
    int64_t *ids;
    float *weights;
    int64_t rows;
    int64_t experts;
    int64_t chosen;
    int32_t normalised;
};

// Sorts assignments [rows, chosen] by expert, and fills the jobs of a mixture, one for each MOEDGE_MOST_ROWS rows at most.
struct moedge_grouping {
    const int64_t *ids;
    const moedge_expert *table;  // [experts]
    int64_t *counts;  // [experts]
    int64_t *token_ids;  // [rows * chosen]: the token of each row of a group
    int64_t *assignment_rows;  // [rows * chosen]: the row of each assignment
    moedge_mixture *mixture;
    int64_t rows;
    int64_t chosen;
    int64_t experts;
    int64_t row_nbytes;  // scratch of one row of an expert
};

// out [rows, columns] = residual + the sum of each row's experts, weighed, in the order in which they were chosen.
struct moedge_combination {
    const uint16_t *outputs;
    const uint16_t *residual;
    const int64_t *assignment_rows;
    const float *weights;
    uint16_t *out;
    int64_t rows;
    int64_t chosen;
    int64_t columns;
};

// Attention as a step: its items, those that a thread takes at once, and scratch that begins at a multiple of 64.
struct moedge_attention_step {
    const moedge_attention *attention;
    int64_t items;
    int64_t at_once;
    char *scratch;
    int64_t thread_nbytes;  // of scratch
};

// A step; the next one begins when it and those before it have ended, if it `waits`.
struct moedge_step {
    moedge_kind kind;
    int32_t waits;
    void *arguments;
};

// Steps that several threads run together, one after the other.
struct moedge_run {
    int64_t num_steps;
    const moedge_step *steps;
    int64_t *threads;  // a counter, 0
    int64_t *counters;  // [num_steps, MOEDGE_STEP_COUNTERS], 0
};

// Rows of a bfloat16 matrix to be quantized, and their planes, which begin at the first of them.
struct moedge_packing {
    const uint16_t *x;
    int64_t stride;  // numbers from row to row
    int64_t rows;
    int64_t columns;
    uint8_t *codes;
    void *scales;
    float *factors;  // [rows] of INT4
    const float *importance;  // of INT3 and VQ2: [columns] or null, how much squares of errors count
    moedge_weight_format format;
    moedge_order order;
    int32_t finite;  // the result: 0 if a number is NaN or infinite
};

// Rows of MXFP4 to be widened to bfloat16, [rows, columns].
struct moedge_widening {
    const uint8_t *codes;
    int64_t code_stride;  // bytes from row to row
    const uint8_t *scales;
    int64_t scale_stride;
    uint16_t *out;  // adjacent rows
    int64_t rows;
    int64_t columns;
};

// A matrix in order `tiles` to be widened to bfloat16, [rows, columns].
struct moedge_tiles_widening {
    moedge_matrix weights;
    uint16_t *out;  // adjacent rows
};

// Blocks of a GGUF file, one after the other, to be dequantized to float32; or bytes, which mean numbers of a table.
struct moedge_blocks {
    const uint8_t *blocks;
    float *out;  // adjacent
    int64_t count;
    moedge_block_type type;
    const float *table;  // of BYTE, 256 numbers
};

#endif
