// One row tile and KV head at work: what its stages share.
#ifndef MOEDGE_ATTENTION_WORK_H
#define MOEDGE_ATTENTION_WORK_H

#include "attention.h"
#include "simd.h"

namespace {

// Vectors that are needed soon, read into the cache a line at a time between products: memory and products then overlap.
struct Ahead {
    const uint8_t **rows = nullptr;
    int count = 0, nbytes = 0, row = 0, offset = 0;

    void steps(int lines) {
        int r = row, o = offset;
        for (; lines > 0 && r < count; lines--) {
            _mm_prefetch((const char *)rows[r] + o, _MM_HINT_T1);
            o += 64;
            if (o >= nbytes) {
                o = 0;
                r++;
            }
        }
        row = r;
        offset = o;
    }
};

struct Work {
    const moedge_attention &a;
    const moedge_rows *tile_rows;
    int head;   // the KV head
    int num;    // Q: queries, rows times group; query n is of row n / group
    // Of the split that is computed: the address of every key or value, and factors of its codes by group.
    const uint8_t **rows, **value_rows, **next_rows;
    float *scales, *zeros, *value_scales, *value_zeros;  // [2][SPLIT]
    float *value_powers;                                 // [3][SPLIT]
    uint8_t *queries;
    float *wide, *factors, *scores, *shares, *tile, *sums, *total, *partial;
    uint8_t *weights, *values;
    const uint8_t *zero;

    Work(const moedge_attention &args, void *scratch) : a(args) {
        const Layout l = layout_of(a);
        uint8_t *base = (uint8_t *)scratch;
        wide = (float *)(base + l.wide);
        queries = base + l.queries;
        factors = (float *)(base + l.factors);
        scores = (float *)(base + l.scores);
        weights = base + l.weights;
        shares = (float *)(base + l.shares);
        tile = (float *)(base + l.tile);
        values = base + l.values;
        sums = (float *)(base + l.sums);
        total = (float *)(base + l.total);
        partial = (float *)(base + l.partial);
        scales = (float *)(base + l.scales);
        zeros = scales + 2 * SPLIT;
        value_scales = scales + 4 * SPLIT;
        value_zeros = scales + 6 * SPLIT;
        value_powers = scales + 8 * SPLIT;
        rows = (const uint8_t **)(base + l.rows);
        value_rows = rows + SPLIT;
        next_rows = rows + 2 * SPLIT;
        memset(base + l.zero, 0, l.nbytes - l.zero);
        zero = base + l.zero;
    }
};

}  // namespace

#endif
