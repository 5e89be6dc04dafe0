// Attention's products of pairs of bf16 (VDPBF16PS) and of four bytes (VPDPBUSD), with sums in float32 and int32.
//
// Keys of 16 tokens are transposed, so that a lane is a token: scores need no sum over lanes. Queries meet quantized keys
// as integers of 8 bits, each SCALED of which have a scale. Weights of values are bf16, or 16 bits in two bytes.
#ifndef MOEDGE_ATTENTION_PACKED_H
#define MOEDGE_ATTENTION_PACKED_H

#include "attention_work.h"

namespace {

inline __mmask64 first_bytes(int count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

inline __mmask16 first_lanes(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

// Transposes bytes `offset` on of 16 vectors of `nbytes` bytes: lane i of out[j * stride] is dword j of vector i.
inline void transpose(const uint8_t *const *rows, int offset, int nbytes, __m512i flip, __m512i *out, int stride) {
    const __mmask64 mask = first_bytes(nbytes - offset);
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_maskz_loadu_epi8(mask, rows[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i p = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), q = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        const __m512i r = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88), s = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
        out[i * stride] = _mm512_xor_si512(_mm512_shuffle_i32x4(p, r, 0x88), flip);
        out[(i + 4) * stride] = _mm512_xor_si512(_mm512_shuffle_i32x4(q, s, 0x88), flip);
        out[(i + 8) * stride] = _mm512_xor_si512(_mm512_shuffle_i32x4(p, r, 0xdd), flip);
        out[(i + 12) * stride] = _mm512_xor_si512(_mm512_shuffle_i32x4(q, s, 0xdd), flip);
    }
}

// Queries are packed in runs of MOST and of powers of two below it, so that a loop keeps their sums in registers.
template <int MOST>
inline int run_of(int left) {
    int size = MOST;
    while (size > left) size /= 2;
    return size;
}

// Keys and queries of bytes whose scores are computed together: their sums take 16 registers. A query's bytes are read for
// all of the keys at once, since a processor reads one register in a cycle, as many as it multiplies.
constexpr int SCORED = 2 * TILE, BYTE_QUERIES = 4;

inline __m512i dword(const void *p) { return _mm512_set1_epi32(*(const int32_t *)p); }

// --- bf16 ---

// q [count][stride] to pairs [dwords][N] for each run of N.
inline void pack_bf16(const float *q, int width, int64_t stride, int count, uint8_t *out) {
    const int dwords = int(padded(width, 32)) / 2;
    for (int begin = 0, n; begin < count; begin += n) {
        n = run_of<8>(count - begin);
        int32_t *run = (int32_t *)out + int64_t(begin) * dwords;
        for (int i = 0; i < n; i++)
            for (int d = 0; d < dwords * 2; d += 32) {
                const float *x = q + (begin + i) * stride + d;
                const __m512 a = _mm512_maskz_loadu_ps(first_lanes(width - d), x);
                const __m512 b = _mm512_maskz_loadu_ps(first_lanes(width - d - 16), x + 16);
                int32_t pairs[16];
                _mm512_storeu_si512(pairs, (__m512i)_mm512_cvtne2ps_pbh(b, a));
                for (int j = 0; j < 16; j++) run[(d / 2 + j) * n + i] = pairs[j];
            }
    }
}

template <int N>
inline void dots_bf16(const __m512i *keys, int dwords, const int32_t *q, float *scores, bool add_up, Ahead &ahead) {
    __m512 sums[N];
    for (int n = 0; n < N; n++) sums[n] = _mm512_setzero_ps();
    for (int i = 0; i < dwords; i++) {
        for (int n = 0; n < N; n++) sums[n] = _mm512_dpbf16_ps(sums[n], (__m512bh)keys[i], (__m512bh)dword(q + i * N + n));
        ahead.step();
    }
    for (int n = 0; n < N; n++) {
        float *out = scores + n * SPLIT;
        _mm512_storeu_ps(out, add_up ? _mm512_add_ps(sums[n], _mm512_loadu_ps(out)) : sums[n]);
    }
}

inline void score_bf16(const Work &w, int part, int t, const uint8_t *queries, bool add_up, Ahead &ahead) {
    const moedge_vectors &v = w.a.keys[part];
    const int nbytes = row_nbytes(v), dwords = int(padded(v.width, 32)) / 2;
    __m512i *keys = (__m512i *)w.tile;
    for (int offset = 0; offset < nbytes; offset += 64)
        transpose(w.rows + t, offset, nbytes, _mm512_setzero_si512(), keys + offset / 4, 1);
    for (int begin = 0, n; begin < w.num; begin += n) {
        n = run_of<8>(w.num - begin);
        const int32_t *q = (const int32_t *)queries + int64_t(begin) * dwords;
        float *scores = w.scores + int64_t(begin) * SPLIT + t;
        if (n == 8) dots_bf16<8>(keys, dwords, q, scores, add_up, ahead);
        else if (n == 4) dots_bf16<4>(keys, dwords, q, scores, add_up, ahead);
        else if (n == 2) dots_bf16<2>(keys, dwords, q, scores, add_up, ahead);
        else dots_bf16<1>(keys, dwords, q, scores, add_up, ahead);
    }
}

// Values of tokens `from` to `to` as pairs of tokens: [runs of 32 elements][pairs][2].
inline void interleave_bf16(const Work &w, int from, int to) {
    const int nbytes = row_nbytes(w.a.values), pairs = (to - from) / 2;
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 32; i++) {
        low[i] = uint16_t(i / 2 + i % 2 * 32);
        high[i] = uint16_t(low[i] + 16);
    }
    const __m512i lows = _mm512_load_si512(low), highs = _mm512_load_si512(high);
    __m512i *out = (__m512i *)w.values;
    for (int pair = 0; pair < pairs; pair++) {
        const uint8_t *first = w.value_rows[from + 2 * pair], *second = w.value_rows[from + 2 * pair + 1];
        for (int offset = 0; offset < nbytes; offset += 64) {
            const __mmask64 mask = first_bytes(nbytes - offset);
            const __m512i a = _mm512_maskz_loadu_epi8(mask, first + offset), b = _mm512_maskz_loadu_epi8(mask, second + offset);
            __m512i *at = out + (int64_t(offset / 64) * pairs + pair) * 2;
            at[0] = _mm512_permutex2var_epi16(a, lows, b);
            at[1] = _mm512_permutex2var_epi16(a, highs, b);
        }
    }
}

template <int N>
inline void sums_bf16(const __m512i *values, int pairs, const uint16_t *weights, float *out, int64_t stride, Ahead &ahead) {
    __m512 sums[N][2];
    for (int n = 0; n < N; n++) sums[n][0] = sums[n][1] = _mm512_setzero_ps();
    for (int i = 0; i < pairs; i++) {
        for (int n = 0; n < N; n++) {
            const __m512bh p = (__m512bh)dword(weights + n * SPLIT + 2 * i);
            sums[n][0] = _mm512_dpbf16_ps(sums[n][0], (__m512bh)values[2 * i], p);
            sums[n][1] = _mm512_dpbf16_ps(sums[n][1], (__m512bh)values[2 * i + 1], p);
        }
        ahead.step();
        ahead.step();
    }
    for (int n = 0; n < N; n++) {
        _mm512_storeu_ps(out + n * stride, sums[n][0]);
        _mm512_storeu_ps(out + n * stride + 16, sums[n][1]);
    }
}

inline void sum_bf16(const Work &w, int from, int to, Ahead &ahead) {
    const int pairs = (to - from) / 2;
    const int64_t stride = padded_width(w.a.values);
    interleave_bf16(w, from, to);
    for (int64_t d = 0; d < w.a.values.width; d += 32) {
        const __m512i *values = (const __m512i *)w.values + d / 32 * pairs * 2;
        for (int begin = 0, n; begin < w.num; begin += n) {
            n = run_of<8>(w.num - begin);
            const uint16_t *weights = (const uint16_t *)w.weights + int64_t(begin) * SPLIT + from;
            float *out = w.sums + begin * stride + d;
            if (n == 8) sums_bf16<8>(values, pairs, weights, out, stride, ahead);
            else if (n == 4) sums_bf16<4>(values, pairs, weights, out, stride, ahead);
            else if (n == 2) sums_bf16<2>(values, pairs, weights, out, stride, ahead);
            else sums_bf16<1>(values, pairs, weights, out, stride, ahead);
        }
    }
}

// --- bytes: int8 and int4 ---

// q [count][stride] to integers of 8 bits, [count][stride] bytes where groups begin at whole cache lines as in keys; and
// for every query numbers_of: what parts add where their keys are flipped is an int32.
inline void pack_bytes(const moedge_vectors &v, const float *q, int64_t stride, int count, uint8_t *out, float *numbers) {
    const int groups = groups_of(v), width = v.width / groups, parts = parts_of(v);
    for (int n = 0; n < count; n++, numbers += numbers_of(v)) {
        for (int g = 0; g < groups; g++) {
            __m512 added = _mm512_setzero_ps();
            for (int part = 0; part < parts; part++) {
                const int d = part * SCALED, left = width - d;
                const float *x = q + n * stride + g * width + d;
                const __m512 a = _mm512_maskz_loadu_ps(first_lanes(left), x), b = _mm512_maskz_loadu_ps(first_lanes(left - 16), x + 16);
                const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
                // Not zero where an element is not finite.
                const float wrong = sum(_mm512_mul_ps(_mm512_add_ps(a, b), _mm512_setzero_ps()));
                const __m512 inverse = _mm512_set1_ps(most > 1e-30f && wrong == 0 ? 127 / most : 0);
                const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), second = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
                uint8_t *at = out + n * stride + g * (stride / groups) + d;
                _mm_storeu_si128((__m128i *)at, _mm512_cvtepi32_epi8(first));
                _mm_storeu_si128((__m128i *)(at + 16), _mm512_cvtepi32_epi8(second));
                const int32_t flips = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
                numbers[g * parts + part] = most / 127 + wrong;
                memcpy(numbers + (groups + g) * parts + part, &flips, 4);
                added = _mm512_add_ps(added, _mm512_add_ps(a, b));
            }
            numbers[2 * groups * parts + g] = sum(added);
        }
    }
}

// What the queries of a run, one after the other, are to dots_bytes: of one group.
struct ByteQueries {
    const uint8_t *codes;
    const float *scales, *flips, *sum;
    int64_t stride, apart;  // of codes and of numbers
};

// Adds the products of N queries with dwords of V tiles of keys: LENGTH of them, or `dwords` where that is 0.
template <int N, int V, int LENGTH>
inline void add_dots(__m512i (&sums)[N][V], const __m512i *keys, const uint8_t *codes, int64_t stride, int dwords) {
    const int count = LENGTH ? LENGTH : dwords;
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const __m512i x = dword(codes + n * stride + 4 * i);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) sums[n][v] = _mm512_dpbusd_epi32(sums[n][v], keys[i * V + v], x);
        }
}

// Scores of V tiles of keys [dwords][V].
template <int N, int V>
inline void dots_bytes(const __m512i *keys, int dwords, const ByteQueries &q, bool flipped, const float *scales,
                       const float *zeros, float *scores, bool add_up, Ahead &ahead) {
    constexpr int WHOLE = SCALED / 4;
    __m512 totals[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) totals[n][v] = _mm512_setzero_ps();
    for (int begin = 0, part = 0; begin < dwords; begin += WHOLE, part++) {
        __m512i sums[N][V];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++)
                sums[n][v] = flipped ? dword(q.flips + n * q.apart + part) : _mm512_setzero_si512();
        const __m512i *at = keys + begin * V;
        if (dwords - begin >= WHOLE) add_dots<N, V, WHOLE>(sums, at, q.codes + 4 * begin, q.stride, 0);
        else add_dots<N, V, 0>(sums, at, q.codes + 4 * begin, q.stride, dwords - begin);
        for (int n = 0; n < N; n++) {
            const __m512 scale = _mm512_set1_ps(q.scales[n * q.apart + part]);
            for (int v = 0; v < V; v++) totals[n][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[n][v]), scale, totals[n][v]);
        }
        ahead.steps(WHOLE * V);
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) {
            const int t = v * TILE;
            float *out = scores + n * SPLIT + t;
            __m512 x = _mm512_mul_ps(totals[n][v], _mm512_loadu_ps(scales + t));
            if (zeros) x = _mm512_fmadd_ps(_mm512_set1_ps(q.sum[n * q.apart]), _mm512_loadu_ps(zeros + t), x);
            _mm512_storeu_ps(out, add_up ? _mm512_add_ps(x, _mm512_loadu_ps(out)) : x);
        }
}

template <int V>
inline void score_bytes(const Work &w, int part, int t, const uint8_t *queries, const float *numbers, bool add_up, Ahead &ahead) {
    const moedge_vectors &v = w.a.keys[part];
    const bool int8 = v.format == MOEDGE_INT8;
    const int nbytes = row_nbytes(v), groups = groups_of(v), dwords = int(padded(nbytes, 4)) / 4;
    const int vectors = int(padded(nbytes, 64)) / 4 * V;
    __m512i *keys = (__m512i *)w.tile;
    const __m512i flip = int8 ? _mm512_set1_epi8(char(-128)) : _mm512_setzero_si512(), nibble = _mm512_set1_epi8(15);
    for (int offset = 0; offset < nbytes; offset += 64)
        for (int i = 0; i < V; i++)
            transpose(w.rows + t + i * TILE, offset, nbytes, flip, keys + offset / 4 * V + i, V);
    for (int i = 0; !int8 && i < dwords * V; i++) {
        keys[vectors + i] = _mm512_and_si512(_mm512_srli_epi16(keys[i], 4), nibble);
        keys[i] = _mm512_and_si512(keys[i], nibble);
    }
    const int64_t stride = padded_width(v), parts = parts_of(v), apart = numbers_of(v);
    for (int begin = 0, n; begin < w.num; begin += n) {
        n = run_of<BYTE_QUERIES>(w.num - begin);
        float *scores = w.scores + int64_t(begin) * SPLIT + t;
        for (int g = 0; g < groups; g++) {
            const float *own = numbers + begin * apart;
            const ByteQueries q{queries + begin * stride + g * (stride / groups), own + g * parts,
                                own + (groups + g) * parts, own + 2 * groups * parts + g, stride, apart};
            const float *scales = w.scales + g * SPLIT + t, *zeros = int8 ? nullptr : w.zeros + g * SPLIT + t;
            const bool more = add_up || g > 0;
            if (n == 4) dots_bytes<4, V>(keys + g * vectors, dwords, q, int8, scales, zeros, scores, more, ahead);
            else if (n == 2) dots_bytes<2, V>(keys + g * vectors, dwords, q, int8, scales, zeros, scores, more, ahead);
            else dots_bytes<1, V>(keys + g * vectors, dwords, q, int8, scales, zeros, scores, more, ahead);
        }
    }
}

// Values of tokens `from` to `to` as four tokens of an element beside each other: [runs of 64 codes][quads][4].
template <bool INT4, bool WHOLE>
inline void interleave_bytes(const Work &w, int from, int to) {
    const int nbytes = row_nbytes(w.a.values), quads = (to - from) / 4, lines = int(padded(nbytes, 64)) / 64;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i *out = (__m512i *)w.values;
    for (int quad = 0; quad < quads; quad++) {
        const uint8_t *const *rows = w.value_rows + from + 4 * quad;
        for (int line = 0; line < lines; line++) {
            const __mmask64 mask = WHOLE ? ~0ull : first_bytes(nbytes - line * 64);
            __m512i x[4];
            for (int i = 0; i < 4; i++)
                x[i] = WHOLE ? _mm512_loadu_si512(rows[i] + line * 64) : _mm512_maskz_loadu_epi8(mask, rows[i] + line * 64);
            const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
            const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
            x[0] = _mm512_unpacklo_epi16(a, c);
            x[1] = _mm512_unpackhi_epi16(a, c);
            x[2] = _mm512_unpacklo_epi16(b, d);
            x[3] = _mm512_unpackhi_epi16(b, d);
            __m512i *at = out + (int64_t(line) * quads + quad) * 4, *next = at + int64_t(lines) * quads * 4;
            for (int i = 0; i < 4; i++) at[i] = INT4 ? _mm512_and_si512(x[i], nibble) : x[i];
            for (int i = 0; INT4 && i < 4; i++) next[i] = _mm512_and_si512(_mm512_srli_epi16(x[i], 4), nibble);
        }
    }
}

inline void interleave_bytes(const Work &w, int from, int to) {
    const bool whole = row_nbytes(w.a.values) % 64 == 0;
    if (w.a.values.format == MOEDGE_INT4) {
        if (whole) interleave_bytes<true, true>(w, from, to);
        else interleave_bytes<true, false>(w, from, to);
    } else if (whole) interleave_bytes<false, true>(w, from, to);
    else interleave_bytes<false, false>(w, from, to);
}

template <int N>
inline void sums_bytes(const __m512i *values, int quads, const uint8_t *weights, int64_t weights_stride, const float *shares,
                       float *out, int64_t stride, Ahead &ahead) {
    __m512i high[N][4], low[N][4];
    for (int n = 0; n < N; n++)
        for (int j = 0; j < 4; j++) high[n][j] = low[n][j] = _mm512_setzero_si512();
    for (int i = 0; i < quads; i++) {
        for (int n = 0; n < N; n++) {
            const __m512i p = dword(weights + n * weights_stride + 4 * i), r = dword(weights + n * weights_stride + SPLIT + 4 * i);
            for (int j = 0; j < 4; j++) {
                high[n][j] = _mm512_dpbusd_epi32(high[n][j], p, values[4 * i + j]);
                low[n][j] = _mm512_dpbusd_epi32(low[n][j], r, values[4 * i + j]);
            }
        }
        ahead.step();
        ahead.step();
    }
    for (int n = 0; n < N; n++) {
        __m512 x[4];
        for (int j = 0; j < 4; j++) {
            x[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[n][j]), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low[n][j]));
            x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(shares[4 * n]));
        }
        // Lane 4 * L + i of x[j] is element 16 * L + 4 * j + i.
        const __m512 p = _mm512_shuffle_f32x4(x[0], x[1], 0x44), q = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
        const __m512 r = _mm512_shuffle_f32x4(x[2], x[3], 0x44), s = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
        _mm512_storeu_ps(out + n * stride, _mm512_shuffle_f32x4(p, r, 0x88));
        _mm512_storeu_ps(out + n * stride + 16, _mm512_shuffle_f32x4(p, r, 0xdd));
        _mm512_storeu_ps(out + n * stride + 32, _mm512_shuffle_f32x4(q, s, 0x88));
        _mm512_storeu_ps(out + n * stride + 48, _mm512_shuffle_f32x4(q, s, 0xdd));
    }
}

inline void sum_bytes(const Work &w, int from, int to, Ahead &ahead) {
    const moedge_vectors &v = w.a.values;
    const int quads = (to - from) / 4, groups = groups_of(v), runs = int(padded_width(v) / 64);
    const int64_t stride = padded_width(v), weights_stride = groups * 2 * SPLIT;
    interleave_bytes(w, from, to);
    for (int run = 0; run < runs; run++) {
        const int g = run * groups / runs;
        const __m512i *values = (const __m512i *)w.values + int64_t(run) * quads * 4;
        for (int n = 0; n < w.num; n += 2) {
            const uint8_t *weights = w.weights + n * weights_stride + g * 2 * SPLIT + from;
            float *out = w.sums + n * stride + run * 64;
            const float *shares = w.shares + 4 * n + g;
            if (n + 1 < w.num) sums_bytes<2>(values, quads, weights, weights_stride, shares, out, stride, ahead);
            else sums_bytes<1>(values, quads, weights, weights_stride, shares, out, stride, ahead);
        }
    }
}

}  // namespace

#endif
