// The scratch of attention's kernels, the same for every instruction set.
#ifndef MOEDGE_ATTENTION_H
#define MOEDGE_ATTENTION_H

#include "moedge_cpu.h"

namespace {

constexpr int SPLIT = MOEDGE_SPLIT;
// Keys whose scores are computed together.
constexpr int TILE = 16;

inline int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline int row_nbytes(const moedge_vectors &v) {
    switch (v.format) {
        case MOEDGE_FP32: return v.width * 4;
        case MOEDGE_INT8: return v.width;
        case MOEDGE_INT4: return v.width / 2;
        default: return v.width * 2;
    }
}

inline int groups_of(const moedge_vectors &v) { return v.format == MOEDGE_INT4 ? 2 : v.format == MOEDGE_INT8; }

// Elements of a query that are integers of one byte share a scale by this many.
constexpr int SCALED = 32;

// Parts of a query of SCALED elements, in each group of its keys.
inline int parts_of(const moedge_vectors &v) {
    const int groups = groups_of(v);
    return groups == 0 ? 0 : (v.width / groups + SCALED - 1) / SCALED;
}

// Floats beside a packed query: the scale of each part, twice, and what flipped keys add to its sum, in one of the query's
// two lanes; then the sum of each group. A run of queries has [parts][queries][2] of the first two, and [groups][queries].
inline int numbers_of(const moedge_vectors &v) { return 4 * groups_of(v) * parts_of(v) + groups_of(v); }

// Queries that meet keys together, of `left` queries: each has two lanes of a register.
inline int lanes_of(int left) { return left > 4 ? 8 : 4; }

// Queries with those that fill up registers: at most MOEDGE_ROWS * group for any number of rows.
inline int64_t padded_queries(int64_t count) { return padded(count, 4); }

// Elements of a vector with padding: every group of int4 is padded to whole cache lines of codes, others to 64.
inline int64_t padded_width(const moedge_vectors &v) {
    return v.format == MOEDGE_INT4 ? 2 * padded(v.width / 2, 64) : padded(v.width, 64);
}

inline int64_t query_width(const moedge_attention &a) {
    int64_t width = 0;
    for (int part = 0; part < a.num_parts; part++) width += a.keys[part].width;
    return width;
}

// Where the arrays of one thread's scratch are, in bytes; all at multiples of 64.
struct Layout {
    int64_t wide;      // float [Q][padded width of one part of keys]
    int64_t queries;   // float or packed, [parts][Q][padded width]
    int64_t factors;   // float [parts][Q][numbers_of]: of packed queries
    int64_t scores;    // float [Q][SPLIT]
    int64_t weights;   // bytes [groups][Q][2][SPLIT], or bf16 [Q][SPLIT]
    int64_t shares;    // float [Q][4]: factors of weights by group, then what zeros add
    int64_t tile;      // keys that are widened, or filled up to whole steps
    int64_t values;    // values of a split, interleaved, or of a tile, widened
    int64_t sums;      // float [Q][padded width of values]
    int64_t total;     // float [Q][width of values + 2]: sums, their exponent and the sum of weights
    int64_t partial;   // the same, of one split
    int64_t scales;    // float [2 scales, 2 zeros][SPLIT] of keys, then of values; then [3][SPLIT], see split_scales
    int64_t rows;      // the address of every key and value of a split; then what is read ahead
    int64_t zero;      // a vector of zeros
    int64_t nbytes;
};

inline int64_t take(int64_t &nbytes, int64_t count) {
    const int64_t begin = nbytes;
    nbytes += padded(count, 64);
    return begin;
}

inline Layout layout_of(const moedge_attention &a) {
    Layout l;
    int64_t n = 0, query = 0, numbers = 0, widest = padded_width(a.values);
    for (int part = 0; part < a.num_parts; part++) {
        query += padded_width(a.keys[part]);
        numbers += numbers_of(a.keys[part]);
        if (padded_width(a.keys[part]) > widest) widest = padded_width(a.keys[part]);
    }
    const int64_t count = int64_t(MOEDGE_ROWS) * a.group;
    l.wide = take(n, count * widest * 4);
    l.queries = take(n, count * query * 4);
    l.factors = take(n, count * numbers * 4);
    l.scores = take(n, count * SPLIT * 4);
    l.weights = take(n, count * SPLIT * 4);
    l.shares = take(n, count * 16);
    l.tile = take(n, TILE * widest * 4);
    l.values = take(n, SPLIT * padded_width(a.values) * 2);
    l.sums = take(n, count * padded_width(a.values) * 4);
    l.total = take(n, count * (a.values.width + 2) * 4);
    l.partial = take(n, count * (a.values.width + 2) * 4);
    l.scales = take(n, 11 * SPLIT * 4);
    const int64_t lines = (padded(row_nbytes(a.keys[0]), 64) + padded(row_nbytes(a.values), 64)) / 64;
    l.rows = take(n, (2 + 4 + lines) * SPLIT * 8 + 64);
    l.zero = take(n, widest * 4);
    l.nbytes = n;
    return l;
}

}  // namespace

#endif
