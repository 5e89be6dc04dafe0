// Attention's products of pairs of bf16 (VDPBF16PS) and of four bytes (VPDPBUSD), with sums in float32 and int32.
//
// Eight bytes of a key, in all lanes of a register, meet those of all queries: a query has two lanes, whose sums are added
// at the end, and keys are read as they lie. Queries meet quantized keys as integers of 8 bits, each SCALED of which have a
// scale. Weights of values are bf16, or 16 bits in two bytes.
#ifndef MOEDGE_ATTENTION_PACKED_H
#define MOEDGE_ATTENTION_PACKED_H

#include "attention_softmax.h"
#include "attention_work.h"

namespace {

// Queries are packed in runs of MOST and of powers of two below it, so that a loop keeps their sums in registers.
template <int MOST>
inline int run_of(int left) {
    int size = MOST;
    while (size > left) size /= 2;
    return size;
}

inline __m512i dword(const void *p) { return _mm512_set1_epi32(*(const int32_t *)p); }

// --- scores ---

// Keys whose scores are computed together, keys that all queries meet before the next ones, and bytes of a key between two
// looks at what is read ahead.
constexpr int SCORED = 8, CHUNK = 32, STEP = 32;

inline int64_t qword(const void *p) {
    int64_t x;
    memcpy(&x, p, 8);
    return x;
}

// L queries, in two lanes of 32 bits each.
template <int L>
struct Lanes;

template <>
struct Lanes<4> {
    using Ints = __m256i;
    using Floats = __m256;
    static Ints load(const void *p) { return _mm256_loadu_si256((const Ints *)p); }
    static Ints all(const void *p) { return _mm256_set1_epi64x(qword(p)); }
    static Ints all_bytes(int x) { return _mm256_set1_epi8(char(x)); }
    static Ints flip(Ints x, Ints bits) { return _mm256_xor_si256(x, bits); }
    static Ints mask(Ints x, Ints bits) { return _mm256_and_si256(x, bits); }
    static Ints high(Ints x) { return _mm256_srli_epi16(x, 4); }
    static Ints dot(Ints sum, Ints keys, Ints q) { return _mm256_dpbusd_epi32(sum, keys, q); }
    static Floats dot(Floats sum, Ints keys, Ints q) { return _mm256_dpbf16_ps(sum, (__m256bh)keys, (__m256bh)q); }
    static __m512 scales(const float *p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }
};

template <>
struct Lanes<8> {
    using Ints = __m512i;
    using Floats = __m512;
    static Ints load(const void *p) { return _mm512_loadu_si512(p); }
    static Ints all(const void *p) { return _mm512_set1_epi64(qword(p)); }
    static Ints all_bytes(int x) { return _mm512_set1_epi8(char(x)); }
    static Ints flip(Ints x, Ints bits) { return _mm512_xor_si512(x, bits); }
    static Ints mask(Ints x, Ints bits) { return _mm512_and_si512(x, bits); }
    static Ints high(Ints x) { return _mm512_srli_epi16(x, 4); }
    static Ints dot(Ints sum, Ints keys, Ints q) { return _mm512_dpbusd_epi32(sum, keys, q); }
    static Floats dot(Floats sum, Ints keys, Ints q) { return _mm512_dpbf16_ps(sum, (__m512bh)keys, (__m512bh)q); }
    static __m512 scales(const float *p) { return _mm512_loadu_ps(p); }
};

// Packed queries of `nbytes` bytes as [nbytes / 8][lanes] runs of eight bytes; `count` of them, the others are zeros.
inline void pack_lanes(const uint8_t *queries, int64_t nbytes, int count, int lanes, uint8_t *out) {
    for (int64_t i = 0; i < nbytes; i += 8)
        for (int n = 0; n < lanes; n++, out += 8) {
            if (n < count) memcpy(out, queries + n * nbytes + i, 8);
            else memset(out, 0, 8);
        }
}

// q [count][stride] to pairs of bf16, see pack_lanes.
inline void pack_bf16(const float *q, int width, int64_t stride, int count, uint8_t *out) {
    uint8_t *pairs = out + padded_queries(count) * stride * 2;
    for (int begin = 0, lanes; begin < count; begin += lanes) {
        lanes = lanes_of(count - begin);
        const int own = count - begin < lanes ? count - begin : lanes;
        for (int n = 0; n < own; n++)
            for (int64_t d = 0; d < stride; d += 32) {
                const float *x = q + (begin + n) * stride + d;
                const __m512 a = _mm512_maskz_loadu_ps(first_lanes(int(width - d)), x);
                const __m512 b = _mm512_maskz_loadu_ps(first_lanes(int(width - d - 16)), x + 16);
                _mm512_storeu_si512(pairs + (n * stride + d) * 2, (__m512i)_mm512_cvtne2ps_pbh(b, a));
            }
        pack_lanes(pairs, stride * 2, own, lanes, out);
        out += lanes * stride * 2;
    }
}

// SCALED elements of a query, or `count` where that is less, as integers of 8 bits; their scale, and what flipped keys add
// to their products, an int32. The elements are added to those of `added`.
inline void pack_part(const float *x, int count, uint8_t *codes, float *scale, float *flips, __m512 &added) {
    const __m512 a = _mm512_maskz_loadu_ps(first_lanes(count), x), b = _mm512_maskz_loadu_ps(first_lanes(count - 16), x + 16);
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    // Not zero where an element is not finite.
    const float wrong = sum(_mm512_mul_ps(_mm512_add_ps(a, b), _mm512_setzero_ps()));
    const __m512 inverse = _mm512_set1_ps(most > 1e-30f && wrong == 0 ? 127 / most : 0);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), second = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(codes + 16), _mm512_cvtepi32_epi8(second));
    const int32_t flipped = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    memcpy(flips, &flipped, 4);
    *scale = most / 127 + wrong;
    added = _mm512_add_ps(added, _mm512_add_ps(a, b));
}

// q [count][stride] to integers of 8 bits, see pack_lanes, where groups begin at whole cache lines as in keys; and their
// numbers, see numbers_of.
inline void pack_bytes(const moedge_vectors &v, const float *q, int64_t stride, int count, uint8_t *out, float *numbers) {
    const int groups = groups_of(v), width = v.width / groups, parts = parts_of(v);
    uint8_t *codes = out + padded_queries(count) * stride;
    for (int begin = 0, lanes; begin < count; begin += lanes) {
        lanes = lanes_of(count - begin);
        const int own = count - begin < lanes ? count - begin : lanes;
        memset(codes, 0, own * stride);
        memset(numbers, 0, numbers_of(v) * lanes * sizeof(float));
        for (int n = 0; n < own; n++)
            for (int g = 0; g < groups; g++) {
                __m512 added = _mm512_setzero_ps();
                for (int part = 0; part < parts; part++) {
                    const int d = part * SCALED;
                    float *scales = numbers + 2 * (g * parts + part) * lanes, *own_scale = scales + n / 2 * 4 + n % 2;
                    pack_part(q + (begin + n) * stride + g * width + d, width - d,
                              codes + n * stride + g * (stride / groups) + d, own_scale,
                              scales + 2 * groups * parts * lanes + 2 * n, added);
                    own_scale[2] = *own_scale;
                }
                numbers[(4 * groups * parts + g) * lanes + n] = sum(added);
            }
        pack_lanes(codes, stride, own, lanes, out);
        out += lanes * stride;
        numbers += numbers_of(v) * lanes;
    }
}

// A run of L queries and the keys of a chunk.
struct Scored {
    const uint8_t *const *keys;
    int num_keys;  // a multiple of SCORED
    const uint8_t *queries;
    int count;  // queries that are no padding
    int parts;  // of STEP bytes
    bool add_up;
};

inline __m512 even_lanes(__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0x88); }

inline __m512 odd_lanes(__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0xdd); }

inline __m512 add_pair(__m512 a, __m512 b) { return _mm512_add_ps(even_lanes(a, b), odd_lanes(a, b)); }

inline __m512i add_pair(__m512i a, __m512i b) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(even_lanes(x, y)), _mm512_castps_si512(odd_lanes(x, y)));
}

inline __m512 join(__m256 a, __m256 b) { return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1); }

inline __m512i join(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

// Adds up the two lanes of every query. Of eight queries, lane L of out[i] has queries 2 * L and 2 * L + 1 of key 2 * i,
// then of key 2 * i + 1; of four, lanes 2 and 3 have those of keys 2 * i + 4 and 2 * i + 5.
template <class Whole>
inline void add_lanes(const Whole (&x)[SCORED], Whole (&out)[4]) {
    for (int i = 0; i < 4; i++) out[i] = add_pair(x[2 * i], x[2 * i + 1]);
}

template <class Half, class Whole>
inline void add_lanes(const Half (&x)[SCORED], Whole (&out)[2]) {
    for (int i = 0; i < 2; i++) out[i] = add_pair(join(x[2 * i], x[2 * i + 4]), join(x[2 * i + 1], x[2 * i + 5]));
}

// Turns what add_lanes gives into scores of two queries, i and i + 2 of each four, with SCORED keys.
inline void order_pairs(const __m512 (&pairs)[4], __m512 (&out)[4]) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512i even = _mm512_castps_si512(even_lanes(pairs[0], pairs[1]));
    const __m512i odd = _mm512_castps_si512(odd_lanes(pairs[0], pairs[1]));
    const __m512i even_rest = _mm512_castps_si512(even_lanes(pairs[2], pairs[3]));
    const __m512i odd_rest = _mm512_castps_si512(odd_lanes(pairs[2], pairs[3]));
    out[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi64(even, low, even_rest));
    out[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi64(odd, low, odd_rest));
    out[2] = _mm512_castsi512_ps(_mm512_permutex2var_epi64(even, high, even_rest));
    out[3] = _mm512_castsi512_ps(_mm512_permutex2var_epi64(odd, high, odd_rest));
}

inline void order_pairs(const __m512 (&pairs)[2], __m512 (&out)[2]) {
    const __m512 even = even_lanes(pairs[0], pairs[1]), odd = odd_lanes(pairs[0], pairs[1]);
    out[0] = _mm512_shuffle_f32x4(even, even, 0xd8);
    out[1] = _mm512_shuffle_f32x4(odd, odd, 0xd8);
}

// Stores what `finish(query, SCORED scores of two queries)` makes of pairs, or adds it to the scores [L][SPLIT].
template <int HALF, class Finish>
inline void put_scores(const __m512 (&pairs)[HALF], int count, float *scores, bool add_up, Finish finish) {
    __m512 both[HALF];
    order_pairs(pairs, both);
    for (int i = 0; i < HALF; i++) {
        const int n = i / 2 * 4 + i % 2;
        const __m512 x = finish(n, both[i]);
        const __m256 halves[] = {_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)};
        for (int j = 0; j < 2; j++) {
            if (n + 2 * j >= count) break;
            float *out = scores + int64_t(n + 2 * j) * SPLIT;
            _mm256_storeu_ps(out, add_up ? _mm256_add_ps(halves[j], _mm256_loadu_ps(out)) : halves[j]);
        }
    }
}

template <int L>
inline void dots_bf16(const Scored &s, float *scores, Ahead &ahead) {
    using Run = Lanes<L>;
    for (int begin = 0; begin < s.num_keys; begin += SCORED) {
        typename Run::Floats sums[SCORED] = {};
        const uint8_t *q = s.queries, *const *keys = s.keys + begin;
        for (int part = 0; part < s.parts; part++, q += STEP * L) {
#pragma GCC unroll 4
            for (int i = 0; i < STEP / 8; i++) {
                const typename Run::Ints x = Run::load(q + 8 * L * i);
#pragma GCC unroll 8
                for (int t = 0; t < SCORED; t++) sums[t] = Run::dot(sums[t], Run::all(keys[t] + part * STEP + 8 * i), x);
            }
            ahead.step();
        }
        __m512 pairs[L / 2];
        add_lanes(sums, pairs);
        put_scores(pairs, s.count, scores + begin, s.add_up, [](int, __m512 x) { return x; });
    }
}

// What codes and their products with queries of 8 bits are multiplied by and have added: of one group.
struct Factors {
    const float *queries, *flips, *sums;  // of L queries: see numbers_of
    const float *scales, *zeros;          // of keys
};

enum Codes { SIGNED, LOW, HIGH };

template <int L, Codes CODES>
inline void dots_bytes(const Scored &s, const Factors &f, float *scores, Ahead &ahead) {
    using Run = Lanes<L>;
    const typename Run::Ints bits = Run::all_bytes(CODES == SIGNED ? -128 : 15);
    for (int begin = 0; begin < s.num_keys; begin += SCORED) {
        // Of even and of odd parts, in turns.
        __m512 totals[L / 2] = {}, others[L / 2] = {};
        const uint8_t *q = s.queries, *const *keys = s.keys + begin;
        for (int part = 0; part < s.parts; part++, q += STEP * L) {
            typename Run::Ints sums[SCORED] = {};
            for (int t = 0; CODES == SIGNED && t < SCORED; t++) sums[t] = Run::load(f.flips + part * 2 * L);
#pragma GCC unroll 4
            for (int i = 0; i < STEP / 8; i++) {
                const typename Run::Ints x = Run::load(q + 8 * L * i);
#pragma GCC unroll 8
                for (int t = 0; t < SCORED; t++) {
                    const typename Run::Ints key = Run::all(keys[t] + part * STEP + 8 * i);
                    sums[t] = Run::dot(sums[t], CODES == SIGNED ? Run::flip(key, bits) : Run::mask(CODES == LOW ? key : Run::high(key), bits), x);
                }
            }
            __m512i pairs[L / 2];
            add_lanes(sums, pairs);
            const __m512 scales = Run::scales(f.queries + part * 2 * L);
            for (int i = 0; i < L / 2; i++) {
                const __m512 total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(pairs[i]), scales, totals[i]);
                totals[i] = others[i];
                others[i] = total;
            }
            ahead.step();
        }
        for (int i = 0; i < L / 2; i++) totals[i] = _mm512_add_ps(totals[i], others[i]);
        const __m512 scale = _mm512_broadcast_f32x8(_mm256_loadu_ps(f.scales + begin));
        put_scores(totals, s.count, scores + begin, s.add_up, [&](int n, __m512 x) {
            x = _mm512_mul_ps(x, scale);
            if (CODES == SIGNED) return x;
            const __m512 sums = _mm512_insertf32x8(_mm512_set1_ps(f.sums[n]), _mm256_set1_ps(f.sums[n + 2]), 1);
            return _mm512_fmadd_ps(sums, _mm512_broadcast_f32x8(_mm256_loadu_ps(f.zeros + begin)), x);
        });
    }
}

template <int L>
inline void dots(const Work &w, const moedge_vectors &v, int t, Scored s, const float *numbers, float *scores, Ahead &ahead) {
    if (v.format == MOEDGE_BF16) return dots_bf16<L>(s, scores, ahead);
    const int groups = groups_of(v), parts = groups * parts_of(v) * 2 * L;
    const Factors f{numbers, numbers + parts, numbers + 2 * parts, w.scales + t, w.zeros + t};
    if (v.format == MOEDGE_INT8) return dots_bytes<L, SIGNED>(s, f, scores, ahead);
    const Factors second{f.queries + parts / 2, nullptr, f.sums + L, f.scales + SPLIT, f.zeros + SPLIT};
    dots_bytes<L, LOW>(s, f, scores, ahead);
    s.queries += padded_width(v) / 2 * L;
    s.add_up = true;
    dots_bytes<L, HIGH>(s, second, scores, ahead);
}

// Keys of whole STEPs: a last one that is shorter is filled up with zeros.
inline const uint8_t *const *whole_keys(const Work &w, const uint8_t *const *rows, int count, int nbytes, const uint8_t **keys) {
    if (nbytes % STEP == 0) return rows;
    uint8_t *out = (uint8_t *)w.tile;
    for (int t = 0; t < count; t++) {
        keys[t] = out;
        for (int offset = 0; offset < nbytes; offset += 64, out += 64)
            _mm512_storeu_si512(out, _mm512_maskz_loadu_epi8(first_bytes(nbytes - offset), rows[t] + offset));
    }
    return keys;
}

// Scores of tokens `from` to `to` of the split.
inline void score_packed(const Work &w, int part, int from, int to, const uint8_t *queries, const float *numbers, Ahead &ahead) {
    const moedge_vectors &v = w.a.keys[part];
    const int nbytes = row_nbytes(v), parts = (nbytes + STEP - 1) / STEP;
    const int64_t stride = padded_width(v) * (v.format == MOEDGE_BF16 ? 2 : 1);
    // What is read ahead has been when as many keys have been multiplied.
    const int steps = parts * ((w.num + 7) / 8) * (v.format == MOEDGE_INT4 ? 2 : 1) * (to - from) / SCORED;
    ahead.spread(steps);
    const uint8_t *filled[CHUNK];
    for (int t = from; t < to; t += CHUNK) {
        const int count = to - t < CHUNK ? to - t : CHUNK;
        Scored s{whole_keys(w, w.rows + t, count, nbytes, filled), count, queries, 0, parts, part > 0};
        const float *own = numbers;
        for (int begin = 0, lanes; begin < w.num; begin += lanes) {
            lanes = lanes_of(w.num - begin);
            s.count = w.num - begin;
            float *scores = w.scores + int64_t(begin) * SPLIT + t;
            if (lanes == 8) dots<8>(w, v, t, s, own, scores, ahead);
            else dots<4>(w, v, t, s, own, scores, ahead);
            s.queries += stride * lanes;
            own += numbers_of(v) * lanes;
        }
    }
}

// --- sums of bf16 values ---

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
    ahead.spread(int64_t(pairs) * ((w.num + 7) / 8) * (stride / 32));
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

// --- sums of int8 and int4 values ---

// Puts the bytes of an element of four vectors beside each other: those of element 16 * L + 4 * j + i are dword i of lane L
// of x[j].
inline void interleave(__m512i (&x)[4]) {
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi16(a, c);
    x[1] = _mm512_unpackhi_epi16(a, c);
    x[2] = _mm512_unpacklo_epi16(b, d);
    x[3] = _mm512_unpackhi_epi16(b, d);
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
            interleave(x);
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

// Writes the sums of a query with 64 elements, where its weights have these sums of their bytes; see interleave.
inline void put_sums(const __m512i (&high)[4], const __m512i (&low)[4], float share, float *out) {
    __m512 x[4];
    for (int j = 0; j < 4; j++) {
        x[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[j]), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low[j]));
        x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(share));
    }
    const __m512 p = _mm512_shuffle_f32x4(x[0], x[1], 0x44), q = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    const __m512 r = _mm512_shuffle_f32x4(x[2], x[3], 0x44), s = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    _mm512_storeu_ps(out, _mm512_shuffle_f32x4(p, r, 0x88));
    _mm512_storeu_ps(out + 16, _mm512_shuffle_f32x4(p, r, 0xdd));
    _mm512_storeu_ps(out + 32, _mm512_shuffle_f32x4(q, s, 0x88));
    _mm512_storeu_ps(out + 48, _mm512_shuffle_f32x4(q, s, 0xdd));
}

template <int N>
inline void sums_bytes(const __m512i *values, int quads, const uint8_t *weights, const float *shares, float *out,
                       int64_t stride, Ahead &ahead) {
    __m512i high[N][4], low[N][4];
    for (int n = 0; n < N; n++)
        for (int j = 0; j < 4; j++) high[n][j] = low[n][j] = _mm512_setzero_si512();
    for (int i = 0; i < quads; i++) {
        for (int n = 0; n < N; n++) {
            const uint8_t *both = weights + n * 2 * SPLIT + 4 * i;
            const __m512i p = dword(both), r = dword(both + SPLIT);
            for (int j = 0; j < 4; j++) {
                high[n][j] = _mm512_dpbusd_epi32(high[n][j], p, values[4 * i + j]);
                low[n][j] = _mm512_dpbusd_epi32(low[n][j], r, values[4 * i + j]);
            }
        }
        ahead.step();
    }
    for (int n = 0; n < N; n++) put_sums(high[n], low[n], shares[4 * n], out + n * stride);
}

inline void sum_bytes(const Work &w, int from, int to, Ahead &ahead) {
    const moedge_vectors &v = w.a.values;
    const int quads = (to - from) / 4, groups = groups_of(v), runs = int(padded_width(v) / 64);
    const int64_t stride = padded_width(v);
    interleave_bytes(w, from, to);
    ahead.spread(int64_t(quads) * ((w.num + 1) / 2) * runs);
    for (int run = 0; run < runs; run++) {
        const int g = run * groups / runs;
        const __m512i *values = (const __m512i *)w.values + int64_t(run) * quads * 4;
        for (int n = 0; n < w.num; n += 2) {
            const uint8_t *weights = weight_bytes(w, g, n) + from;
            float *out = w.sums + n * stride + run * 64;
            const float *shares = w.shares + 4 * n + g;
            if (n + 1 < w.num) sums_bytes<2>(values, quads, weights, shares, out, stride, ahead);
            else sums_bytes<1>(values, quads, weights, shares, out, stride, ahead);
        }
    }
}

}  // namespace

#endif
