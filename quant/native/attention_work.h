// One row tile and KV head at work: what its stages share.
#ifndef MOEDGE_ATTENTION_WORK_H
#define MOEDGE_ATTENTION_WORK_H

#include "attention.h"
#include "simd.h"

namespace {

#if MOEDGE_LEVEL >= 2
inline __mmask64 first_bytes(int count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

inline __mmask16 first_lanes(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }
#endif

// Memory that is needed soon, read into the cache a line at a time between products: memory and products then overlap.
class Ahead {
public:
    // `scratch` has room for begins and ends of RUNS runs of adjacent bytes, and for all their lines.
    static constexpr int RUNS = 2 * SPLIT;

    explicit Ahead(const uint8_t **scratch) : begins(scratch), ends(scratch + RUNS), lines(scratch + 2 * RUNS) {}

    void add(const uint8_t *at, int64_t nbytes) {
        begins[runs] = at;
        ends[runs++] = at + nbytes;
    }

    // Lists a line of every run, then the next of every run: a processor that reads on by itself begins early in all.
    void list() {
        int64_t before = -1;
        for (int64_t offset = 0; before < count; offset += 64) {
            before = count;
#if MOEDGE_LEVEL >= 3
            for (int i = 0; i < runs; i += 8) {
                const __mmask8 own = __mmask8(first_lanes(int(runs - i)));
                const __m512i begin = _mm512_maskz_loadu_epi64(own, begins + i);
                const __m512i at = _mm512_add_epi64(begin, _mm512_set1_epi64(offset));
                const __mmask8 within = _mm512_mask_cmplt_epu64_mask(own, at, _mm512_maskz_loadu_epi64(own, ends + i));
                _mm512_storeu_si512(lines + count, _mm512_maskz_compress_epi64(within, at));
                count += __builtin_popcount(within);
            }
#else
            for (int i = 0; i < runs; i++) {
                lines[count] = begins[i] + offset;
                count += begins[i] + offset < ends[i];
            }
#endif
        }
    }

    // Takes `share` of what is left in `times` steps of equal size: reads that are not spread evenly wait for each
    // other, and what is computed waits for them.
    void spread(int64_t times, float share = 1) {
        pace = times > 0 ? (int64_t(float((count << 16) - due) * share) + times - 1) / times : 0;
    }

    void step() {
        due += pace;
        const int64_t end = due >> 16 < count ? due >> 16 : count;
        for (; next < end; next++) _mm_prefetch((const char *)lines[next], _MM_HINT_T1);
    }

private:
    const uint8_t **begins, **ends, **lines;
    int64_t runs = 0, count = 0, next = 0;
    int64_t due = 0, pace = 0;  // in 2^-16 lines
};

struct Work {
    const moedge_attention &a;
    const moedge_rows *tile_rows;
    int head;   // the KV head
    int num;    // Q: queries, rows times group; query n is of row n / group
    // Of the split that is computed: the address of every key or value, and factors of its codes by group.
    const uint8_t **rows, **value_rows, **ahead;
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
        ahead = rows + 2 * SPLIT;
        memset(base + l.zero, 0, l.nbytes - l.zero);
        zero = base + l.zero;
    }
};

}  // namespace

#endif
