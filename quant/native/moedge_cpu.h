// The C interface of libmoedge_cpu.so. Python's side is library.py.
#ifndef MOEDGE_CPU_H
#define MOEDGE_CPU_H

#include <stdint.h>

#define MOEDGE_JOIN_(a, b) a##_##b
#define MOEDGE_JOIN(a, b) MOEDGE_JOIN_(a, b)
// The name of a kernel that is compiled for the instruction set MOEDGE_SET.
#define MOEDGE_NAMED(name) MOEDGE_JOIN(name, MOEDGE_SET)
#define MOEDGE_EXPORT extern "C" __attribute__((visibility("default")))

// Instruction sets, from the least to the most: each has what those before it have.
enum moedge_set {
    MOEDGE_NONE = 0,
    MOEDGE_AVX2 = 1,        // AVX2, FMA, F16C
    MOEDGE_AVX512 = 2,      // AVX-512 F, BW, VL, DQ
    MOEDGE_AVX512BF16 = 3,  // AVX-512 BF16 and VNNI
    MOEDGE_AMX = 4,         // AMX TILE, INT8 and BF16, which attention alone has code for
};

// Formats of the KV cache (quant/kv/format.py), and of activations.
enum moedge_format { MOEDGE_FP32 = 0, MOEDGE_BF16 = 1, MOEDGE_FP16 = 2, MOEDGE_INT8 = 3, MOEDGE_INT4 = 4 };

// One layer's keys or values in the cache: planes as KVPool.planes gives them, contiguous.
struct moedge_vectors {
    const uint8_t *codes;    // [blocks, H, N, bytes of a vector]
    const uint16_t *scales;  // float16 [blocks, H, groups, N]; null where the format has none
    const uint16_t *zeros;   // the same
    int32_t format;          // enum moedge_format
    int32_t width;           // elements of a vector
};

// Consecutive rows of one sequence: queries of tokens at `position` on, which are rows `row` on of the pass.
struct moedge_rows {
    int32_t table;  // the row of `tables`
    int32_t row;
    int32_t count;  // 1 to MOEDGE_ROWS
    int32_t position;
};

enum { MOEDGE_SPLIT = 256, MOEDGE_ROWS = 8, MOEDGE_KEY_PARTS = 2 };

// Rows that products with matrices in order `tiles` compute together.
enum { MOEDGE_MOST_ROWS = 128 };

// Attention of rows over their cached keys and values. A row's past is cut at positions that are multiples of
// MOEDGE_SPLIT, and partial results are added up in that order, whoever computes them.
struct moedge_attention {
    struct moedge_vectors keys[MOEDGE_KEY_PARTS];  // a query has the elements of all parts, one after the other
    struct moedge_vectors values;
    int32_t num_parts;
    int32_t kv_heads;  // H
    int32_t group;     // query heads of one KV head
    int32_t block;     // N, tokens of a block
    int32_t window;    // a row attends to the last `window` tokens, itself included; 0: to all
    int32_t chunk;     // or to those since the start of its chunk of positions; 0: to all
    float scale;
    float softcap;                // 0: none
    const float *sinks;           // [Hq] or null
    const float *shift;           // [T, Hq], scaled, added to scores; or null
    const int32_t *tables;        // [sequences, table_width] block ids
    int64_t table_width;
    const struct moedge_rows *rows;  // [num_rows]
    const void *queries;             // [T, Hq, elements of all key parts]
    void *out;                       // [T, Hq, width of values]
    int32_t query_format;            // fp32, bf16 or fp16
    int32_t out_format;
    int32_t exact;              // products in float32, also where formats have faster ones
    int32_t rotated;            // the first part of keys is stored rotated: queries have to be, by a Hadamard matrix
    int32_t num_pieces;         // of `pieces`; 0 where an item is a whole row of `rows` and a KV head
    const int32_t *pieces;      // [num_pieces, 2]: index in `rows`, number of the split; by row, splits ascending
    float *partials;            // [num_pieces * H, rows * group, width + 2]
    int64_t partial_stride;     // floats of a piece and KV head
};

// Bytes of the scratch of one thread.
MOEDGE_EXPORT int64_t moedge_attention_scratch(const struct moedge_attention *a);

// Every kernel: X(name, arguments with types, arguments); those of attention are compiled for one set more.
// moedge_attend computes items begin to end of rows * H or of pieces * H; moedge_attend_reduce, after all pieces have
// been computed, items of rows * H. `scratch` belongs to the calling thread and begins at a multiple of 64.
#define MOEDGE_ATTENTION_KERNELS(X)                                                              \
    X(moedge_attend, (const struct moedge_attention *a, int64_t begin, int64_t end, void *scratch), \
      (a, begin, end, scratch))                                                                  \
    X(moedge_attend_reduce, (const struct moedge_attention *a, int64_t begin, int64_t end, void *scratch), \
      (a, begin, end, scratch))
#define MOEDGE_KERNELS(X)                                                                        \
    X(moedge_multiply, (const int64_t *given), (given))                                          \
    X(moedge_experts, (const int64_t *given), (given))                                           \
    X(moedge_steps, (const int64_t *given), (given))                                             \
    X(moedge_widen_tiles, (const int64_t *given), (given))                                       \
    X(moedge_pack, (int64_t *given), (given))

// Kernels that have code for processors without AVX2, too.
#define MOEDGE_PORTABLE_KERNELS(X) X(moedge_widen, (const int64_t *given), (given))

// A checksum of the sources, which the loader compares with the sources beside it.
MOEDGE_EXPORT uint32_t moedge_version(void);
// The most that this processor and its operating system support, an enum moedge_set.
MOEDGE_EXPORT int moedge_supported(void);
// Uses the kernels of `set`, or of the most that is supported if that is less; returns which. No kernel may be running.
MOEDGE_EXPORT int moedge_choose(int set);

#define MOEDGE_DECLARE(name, types, args) MOEDGE_EXPORT void name types;
MOEDGE_ATTENTION_KERNELS(MOEDGE_DECLARE)
MOEDGE_KERNELS(MOEDGE_DECLARE)
MOEDGE_PORTABLE_KERNELS(MOEDGE_DECLARE)
#undef MOEDGE_DECLARE

#endif
