// Attention's products with the tiles of AMX: 16 rows of 64 bytes by 16 columns of 64 in one instruction, with sums in
// int32, over int8 and int4 keys and values. The bits are those of attention_packed.h.
//
// Scores: 16 keys, as they lie, meet eight queries, which have two columns each, for the even and the odd parts of
// SCALED elements. Sums: both bytes of the weights of eight queries are 16 rows, and four tokens of an element lie
// beside each other in the values.
#ifndef MOEDGE_ATTENTION_TILES_H
#define MOEDGE_ATTENTION_TILES_H

#include "attention_packed.h"

namespace {

// Bytes of a row of a tile, and of a tile.
constexpr int TILE_ROW = 64, TILE_NBYTES = 16 * TILE_ROW;

// The compiler's own functions do not say that they read memory, so that it may move stores behind them.
template <int T>
inline void load_tile(const void *from, int64_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}

template <int T>
inline void store_tile(void *to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}

template <int T>
inline void zero_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}

// Adds products of bytes: of signed ones, and of unsigned with signed ones.
template <int SUM, int A, int B>
inline void multiply_signed() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

template <int SUM, int A, int B>
inline void multiply_unsigned() {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// The shape of all eight tiles of a thread, while a kernel runs.
struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t nbytes[16] = {TILE_ROW, TILE_ROW, TILE_ROW, TILE_ROW, TILE_ROW, TILE_ROW, TILE_ROW, TILE_ROW};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr Shapes SHAPES;

struct Tiles {
    Tiles() { __asm__ volatile("ldtilecfg %0" ::"m"(SHAPES)); }
    ~Tiles() { __asm__ volatile("tilerelease"); }
};

// --- scores ---

// Chunks of a tile's row in each group of a vector.
inline int chunks_of(const moedge_vectors &v) { return int(padded_width(v) / groups_of(v) / TILE_ROW); }

// q [count][stride] to integers of 8 bits in runs of L queries, [chunks] tiles each: dword [i][n] is the i-th of the
// first 32 bytes of query n, dword [i + 8][n + L] the i-th of the other 32, others are zeros. Numbers of a run: scales
// [chunks][16] in the order of columns, then the sums of each group [L].
inline void pack_tiles(const moedge_vectors &v, const float *q, int64_t stride, int count, uint8_t *out,
                       float *numbers) {
    const int groups = groups_of(v), width = v.width / groups, parts = parts_of(v), chunks = chunks_of(v);
    for (int begin = 0, lanes; begin < count; begin += lanes) {
        lanes = lanes_of(count - begin);
        const int own = count - begin < lanes ? count - begin : lanes;
        memset(out, 0, groups * chunks * TILE_NBYTES);
        memset(numbers, 0, groups * (16 * chunks + lanes) * sizeof(float));
        for (int n = 0; n < own; n++)
            for (int g = 0; g < groups; g++) {
                __m512 added = _mm512_setzero_ps();
                for (int part = 0; part < parts; part++) {
                    const int chunk = g * chunks + part / 2, odd = part % 2, column = odd * lanes + n;
                    const float *x = q + (begin + n) * stride + g * width + part * SCALED;
                    uint8_t codes[SCALED], *tile = out + chunk * TILE_NBYTES + odd * TILE_NBYTES / 2 + column * 4;
                    float flips;
                    pack_part(x, width - part * SCALED, codes, numbers + chunk * 16 + column, &flips, added);
                    for (int i = 0; i < SCALED / 4; i++) memcpy(tile + i * TILE_ROW, codes + 4 * i, 4);
                }
                numbers[groups * chunks * 16 + g * lanes + n] = sum(added);
            }
        out += groups * chunks * TILE_NBYTES;
        numbers += numbers_of(v) * lanes;
    }
}

// 16 keys of one group in rows of whole chunks.
struct Keys {
    const uint8_t *first;
    int64_t stride;
};

// Whether 16 addresses are `stride` apart.
inline bool evenly(const uint8_t *const *rows, int64_t stride) {
    const __m512i step = _mm512_set1_epi64(stride), base = _mm512_set1_epi64(int64_t(rows[0]));
    const __m512i low = _mm512_mullo_epi64(step, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i high = _mm512_add_epi64(low, _mm512_slli_epi64(step, 3));
    return _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(rows), _mm512_add_epi64(base, low)) == 0xff &&
           _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(rows + 8), _mm512_add_epi64(base, high)) == 0xff;
}

// Codes of one byte where they lie, where that is possible.
inline Keys whole_bytes(const uint8_t *const *rows, int nbytes, uint8_t *scratch) {
    if (nbytes % TILE_ROW == 0 && evenly(rows, nbytes)) return {rows[0], nbytes};
    const int64_t stride = padded(nbytes, TILE_ROW);
    for (int t = 0; t < TILE; t++)
        for (int i = 0; i < nbytes; i += TILE_ROW) {
            const __m512i x = _mm512_maskz_loadu_epi8(first_bytes(nbytes - i), rows[t] + i);
            _mm512_storeu_si512(scratch + t * stride + i, x);
        }
    return {scratch, stride};
}

// The low or the high four bits of codes.
inline Keys half_bytes(const uint8_t *const *rows, int nbytes, int shift, uint8_t *scratch) {
    const int64_t stride = padded(nbytes, TILE_ROW);
    for (int t = 0; t < TILE; t++)
        for (int i = 0; i < nbytes; i += TILE_ROW) {
            const __m512i x = _mm512_maskz_loadu_epi8(first_bytes(nbytes - i), rows[t] + i);
            const __m512i half = _mm512_and_si512(_mm512_srli_epi16(x, shift), _mm512_set1_epi8(15));
            _mm512_storeu_si512(scratch + t * stride + i, half);
        }
    return {scratch, stride};
}

// Tiles of queries that stay in registers, from tile 2 on; tile 7 takes the others.
constexpr int KEPT = 5;

inline void load_queries(const uint8_t *queries, int chunks) {
    load_tile<2>(queries, TILE_ROW);
    if (chunks > 1) load_tile<3>(queries + TILE_NBYTES, TILE_ROW);
    if (chunks > 2) load_tile<4>(queries + 2 * TILE_NBYTES, TILE_ROW);
    if (chunks > 3) load_tile<5>(queries + 3 * TILE_NBYTES, TILE_ROW);
    if (chunks > 4) load_tile<6>(queries + 4 * TILE_NBYTES, TILE_ROW);
}

template <int QUERIES>
inline void multiply_chunk(const Keys &keys, int i, int32_t *out) {
    zero_tile<0>();
    load_tile<1>(keys.first + i * TILE_ROW, keys.stride);
    multiply_signed<0, 1, QUERIES>();
    store_tile<0>(out + i * 256, TILE_ROW);
}

inline void multiply_keys(const Keys &keys, const uint8_t *queries, int chunks, int32_t *out) {
    multiply_chunk<2>(keys, 0, out);
    if (chunks > 1) multiply_chunk<3>(keys, 1, out);
    if (chunks > 2) multiply_chunk<4>(keys, 2, out);
    if (chunks > 3) multiply_chunk<5>(keys, 3, out);
    if (chunks > 4) multiply_chunk<6>(keys, 4, out);
    for (int i = KEPT; i < chunks; i++) {
        load_tile<7>(queries + i * TILE_NBYTES, TILE_ROW);
        multiply_chunk<7>(keys, i, out);
    }
}

// Products of 16 keys and a run of queries, of which scores are made while the next ones are multiplied.
struct Products {
    const int32_t *sums;  // [chunks][16 keys][16 columns]
    int chunks, lanes, count;
    const float *query_scales, *query_sums;  // of a group: see pack_tiles
    const float *scales, *zeros;             // of keys; zeros null where they have none
    float *scores;                           // [count][SPLIT]
    bool add_up;
};

// Scores of 16 keys for each of eight queries, without the keys' scales.
inline void add_products(const Products &p, __m512 (&out)[8], Ahead &ahead) {
    __m512 totals[TILE], a[8], b[8];
#pragma GCC unroll 16
    for (int t = 0; t < TILE; t++) totals[t] = _mm512_setzero_ps();
    for (int i = 0; i < p.chunks; i++) {
        const __m512 scales = _mm512_loadu_ps(p.query_scales + 16 * i);
#pragma GCC unroll 16
        for (int t = 0; t < TILE; t++) {
            const __m512i sums = _mm512_loadu_si512(p.sums + 256 * i + 16 * t);
            totals[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scales, totals[t]);
            if (t % 4 == 3) ahead.step();
        }
    }
    // Even and odd parts: of key t in the lower half, of key t + 8 in the upper.
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++)
        a[t] = _mm512_add_ps(_mm512_shuffle_f32x4(totals[t], totals[t + 8], 0x44),
                             _mm512_shuffle_f32x4(totals[t], totals[t + 8], 0xee));
#pragma GCC unroll 4
    for (int t = 0; t < 8; t += 2) {
        b[t] = _mm512_unpacklo_ps(a[t], a[t + 1]);
        b[t + 1] = _mm512_unpackhi_ps(a[t], a[t + 1]);
    }
    // Lane L of a[n] has query n, or n + 4 where L is odd, of four keys.
    const auto pairs = [&](int i, int j, int low, int high) {
        a[low] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[j])));
        a[high] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[j])));
    };
    pairs(0, 2, 0, 1);
    pairs(1, 3, 2, 3);
    pairs(4, 6, 4, 5);
    pairs(5, 7, 6, 7);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        const __m512d x = _mm512_castps_pd(a[n]), y = _mm512_castps_pd(a[n + 4]);
        out[n] = _mm512_castpd_ps(_mm512_permutex2var_pd(x, first, y));
        out[n + 4] = _mm512_castpd_ps(_mm512_permutex2var_pd(x, second, y));
    }
}

// The same for each of four queries.
inline void add_products(const Products &p, __m512 (&out)[4], Ahead &ahead) {
    // Of keys t and t + 4 in pairs[t], of keys t + 8 and t + 12 in pairs[t + 4]: even parts and odd parts of each.
    __m512 pairs[8], a[4];
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) pairs[t] = _mm512_setzero_ps();
    for (int i = 0; i < p.chunks; i++) {
        const __m512 scales = _mm512_broadcast_f32x8(_mm256_loadu_ps(p.query_scales + 16 * i));
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) {
            const __m256i *x = (const __m256i *)(p.sums + 256 * i + 16 * (t / 4 * 8 + t % 4));
            const __m512i both = join(_mm256_loadu_si256(x), _mm256_loadu_si256(x + 8));
            pairs[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), scales, pairs[t]);
            if (t % 2) ahead.step();
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++)
        a[t] = _mm512_add_ps(_mm512_shuffle_f32x4(pairs[t], pairs[t + 4], 0x88),
                             _mm512_shuffle_f32x4(pairs[t], pairs[t + 4], 0xdd));
    const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(a[0], a[1]));
    const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(a[0], a[1]));
    const __m512d low_rest = _mm512_castps_pd(_mm512_unpacklo_ps(a[2], a[3]));
    const __m512d high_rest = _mm512_castps_pd(_mm512_unpackhi_ps(a[2], a[3]));
    out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, low_rest));
    out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, low_rest));
    out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, high_rest));
    out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, high_rest));
}

template <int L>
inline void finish_scores(const Products &p, Ahead &ahead) {
    __m512 totals[L];
    add_products(p, totals, ahead);
    const __m512 scales = _mm512_loadu_ps(p.scales);
#pragma GCC unroll 8
    for (int n = 0; n < L; n++) {
        if (n >= p.count) break;
        __m512 x = _mm512_mul_ps(totals[n], scales);
        if (p.zeros) x = _mm512_fmadd_ps(_mm512_set1_ps(p.query_sums[n]), _mm512_loadu_ps(p.zeros), x);
        if (n % 2 == 0) ahead.step();
        float *out = p.scores + n * SPLIT;
        _mm512_storeu_ps(out, p.add_up ? _mm512_add_ps(x, _mm512_loadu_ps(out)) : x);
    }
}

inline void finish_scores(const Products &p, Ahead &ahead) {
    if (p.lanes == 8) finish_scores<8>(p, ahead);
    else if (p.lanes == 4) finish_scores<4>(p, ahead);
}

// Scores of tokens `from` to `to` of the split.
inline void score_tiles(const Work &w, int part, int from, int to, const uint8_t *queries, const float *numbers,
                        Ahead &ahead) {
    const moedge_vectors &v = w.a.keys[part];
    const int nbytes = row_nbytes(v), groups = groups_of(v), chunks = chunks_of(v);
    // Keys that do not lie as tiles want them; then the products of the last 16 keys, and of the next.
    uint8_t *filled = (uint8_t *)w.tile;
    int32_t *products = (int32_t *)(filled + chunks * TILE_NBYTES), *next = products + chunks * 256;
    ahead.spread((to - from) / TILE * groups * ((w.num + 7) / 8) * (4 * chunks + 4), SCORES_READ);
    Products last{};
    for (int begin = 0, lanes; begin < w.num; begin += lanes) {
        lanes = lanes_of(w.num - begin);
        for (int g = 0; g < groups; g++) {
            const uint8_t *tiles = queries + g * chunks * TILE_NBYTES;
            load_queries(tiles, chunks);
            for (int t = from; t < to; t += TILE) {
                const Keys keys = v.format == MOEDGE_INT4 ? half_bytes(w.rows + t, nbytes, 4 * g, filled)
                                                          : whole_bytes(w.rows + t, nbytes, filled);
                multiply_keys(keys, tiles, chunks, next);
                finish_scores(last, ahead);
                last = {next, chunks, lanes, w.num - begin,
                        numbers + g * chunks * 16, numbers + groups * chunks * 16 + g * lanes,
                        w.scales + g * SPLIT + t, v.zeros ? w.zeros + g * SPLIT + t : nullptr,
                        w.scores + int64_t(begin) * SPLIT + t, part > 0 || g > 0};
                int32_t *const free = products;
                products = next;
                next = free;
            }
        }
        queries += groups * chunks * TILE_NBYTES;
        numbers += numbers_of(v) * lanes;
    }
    finish_scores(last, ahead);
}

// --- sums ---

// Four tokens of 64 codes with every element's beside each other; or of the low or the high four bits of them.
template <Codes CODES>
inline void interleave_quad(const uint8_t *const *rows, int offset, __mmask64 mask, __m512i *out) {
    __m512i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm512_maskz_loadu_epi8(mask, rows[i] + offset);
    interleave(x);
    for (int i = 0; i < 4; i++) {
        if (CODES == HIGH) x[i] = _mm512_srli_epi16(x[i], 4);
        out[i] = CODES == SIGNED ? x[i] : _mm512_and_si512(x[i], _mm512_set1_epi8(15));
    }
}

// Multiplies weights of eight queries, both bytes, with 64 tokens of 64 elements; see interleave.
inline void multiply_values(const uint8_t *weights, const __m512i *values) {
    load_tile<0>(weights, SPLIT);
    load_tile<1>(values, 4 * TILE_ROW);
    multiply_unsigned<4, 0, 1>();
    load_tile<1>(values + 1, 4 * TILE_ROW);
    multiply_unsigned<5, 0, 1>();
    load_tile<1>(values + 2, 4 * TILE_ROW);
    multiply_unsigned<6, 0, 1>();
    load_tile<1>(values + 3, 4 * TILE_ROW);
    multiply_unsigned<7, 0, 1>();
}

inline void zero_sums() {
    zero_tile<4>();
    zero_tile<5>();
    zero_tile<6>();
    zero_tile<7>();
}

// Takes sums [4][queries][2 bytes][16] out of tiles, and writes the sums of `count` queries with 64 elements.
inline void finish_sums(int32_t *sums, int count, const float *shares, float *out, int64_t stride) {
    store_tile<4>(sums, TILE_ROW);
    store_tile<5>(sums + 256, TILE_ROW);
    store_tile<6>(sums + 512, TILE_ROW);
    store_tile<7>(sums + 768, TILE_ROW);
    for (int n = 0; n < count; n++) {
        __m512i high[4], low[4];
        for (int j = 0; j < 4; j++) {
            high[j] = _mm512_loadu_si512(sums + 256 * j + 32 * n);
            low[j] = _mm512_loadu_si512(sums + 256 * j + 32 * n + 16);
        }
        put_sums(high, low, shares[4 * n], out + n * stride);
    }
}

template <Codes CODES>
inline void sum_line(const Work &w, int from, int to, int line, int group, float *out, Ahead &ahead) {
    const int begin = from / PACKED * PACKED, steps = int(padded(to, PACKED) - begin) / PACKED;
    const __mmask64 mask = first_bytes(row_nbytes(w.a.values) - line * TILE_ROW);
    const int64_t stride = padded_width(w.a.values);
    __m512i *values = (__m512i *)w.values;
    int32_t *sums = (int32_t *)(values + SPLIT);
    zero_sums();
    for (int step = 0; step <= steps; step++) {
        // The tiles of a step are read when its values have been written.
        if (step > 0)
            multiply_values(weight_bytes(w, group, 0) + begin + (step - 1) * PACKED, values + (step - 1) * PACKED);
        const int low = begin + step * PACKED, high = low + PACKED < to ? low + PACKED : to;
        for (int t = low < from ? from : low; t < high; t += 4) {
            interleave_quad<CODES>(w.value_rows + t, line * TILE_ROW, mask, values + t - begin);
            ahead.step();
        }
    }
    finish_sums(sums, w.num < 8 ? w.num : 8, w.shares + group, out, stride);
    for (int n = 8; n < w.num; n += 8) {
        zero_sums();
        for (int step = 0; step < steps; step++)
            multiply_values(weight_bytes(w, group, n) + begin + step * PACKED, values + step * PACKED);
        finish_sums(sums, w.num - n < 8 ? w.num - n : 8, w.shares + 4 * n + group, out + n * stride, stride);
    }
}

inline void sum_tiles(const Work &w, int from, int to, Ahead &ahead) {
    const moedge_vectors &v = w.a.values;
    const int groups = groups_of(v), lines = int(padded_width(v) / groups / TILE_ROW);
    const int quads = (to - from) / 4 * groups * lines;
    ahead.spread(quads);
    for (int g = 0; g < groups; g++)
        for (int line = 0; line < lines; line++) {
            float *out = w.sums + (g * lines + line) * TILE_ROW;
            if (v.format == MOEDGE_INT8) sum_line<SIGNED>(w, from, to, line, g, out, ahead);
            else if (g == 0) sum_line<LOW>(w, from, to, line, g, out, ahead);
            else sum_line<HIGH>(w, from, to, line, g, out, ahead);
        }
}

}  // namespace

#endif
