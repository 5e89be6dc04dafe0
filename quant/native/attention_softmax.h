// From products of queries and keys to weights of values.
#ifndef MOEDGE_ATTENTION_SOFTMAX_H
#define MOEDGE_ATTENTION_SOFTMAX_H

#include "attention_work.h"

namespace {

// Where products are computed in tiles: shares of what is read ahead while scores are computed, and of the rest, weights.
constexpr float SCORES_READ = 0.4f, SOFTMAX_READS = 0.4f;

constexpr float LOG2E = 1.44269504f, HIDDEN = -__builtin_inff();

inline int first_visible(const moedge_attention &a, int position) {
    if (a.chunk) return position / a.chunk * a.chunk;
    return a.window && position >= a.window ? position - a.window + 1 : 0;
}

// Positions of a split that a row attends to, relative to the split's first: `from` to `to`, none where they are equal.
struct Visible {
    int from, to;
    Visible(const moedge_attention &a, int position, int64_t split) {
        const int64_t begin = split * SPLIT, low = first_visible(a, position) - begin, high = position + 1 - begin;
        from = low < 0 ? 0 : low > SPLIT ? SPLIT : int(low);
        to = high > SPLIT ? SPLIT : high < from ? from : int(high);
    }
    bool any() const { return from < to; }
};

// The index of query n's head among all heads of all rows of the pass.
inline int64_t head_index(const Work &w, int n) {
    const int64_t row = w.tile_rows->row + n / w.a.group;
    return row * w.a.kv_heads * w.a.group + w.head * w.a.group + n % w.a.group;
}

// Turns the products of query n with keys `from` to `to` into logarithms to the base 2 of its weights, in place, each
// with its number of `added` where that is not null; the largest of them. Those of keys that are not seen are HIDDEN.
inline float logarithms(const Work &w, int n, Visible seen, int from, int to, const float *added) {
    const moedge_attention &a = w.a;
    float *x = w.scores + int64_t(n) * SPLIT;
    const vf factor = set1(a.softcap > 0 ? a.scale / a.softcap : a.scale * LOG2E);
    const float per_unit = a.softcap > 0 ? 1 / a.softcap : LOG2E;
    const vf shift = set1(a.shift ? a.shift[head_index(w, n)] * per_unit : 0.0f);
    vf highest = set1(HIDDEN);
    for (int t = from; t < to; t += W) {
        vf y = fma(load(x + t), factor, shift);
        if (a.softcap > 0) y = mul(tanh(y), set1(a.softcap * LOG2E));
        if (added) y = add(y, load(added + t));
        store(x + t, y);
        highest = max(highest, y);
    }
    if (seen.from > from || seen.to < to) {
        for (int t = from; t < seen.from; t++) x[t] = HIDDEN;
        for (int t = seen.to; t < to; t++) x[t] = HIDDEN;
        highest = set1(HIDDEN);
        for (int t = from; t < to; t += W) highest = max(highest, load(x + t));
    }
    return largest(highest);
}

// Weights of query n relative to 2^exponent, in place of its products; their sum.
inline float softmax(const Work &w, int n, Visible seen, int from, int to, float *exponent) {
    float *x = w.scores + int64_t(n) * SPLIT;
    *exponent = logarithms(w, n, seen, from, to, nullptr);
    vf total = set1(0.0f);
    for (int t = from; t < to; t += W) {
        const vf p = exp2(sub(load(x + t), set1(*exponent)));
        store(x + t, p);
        total = add(total, p);
    }
    return sum(total);
}

#if MOEDGE_LEVEL >= 3

// Tokens whose weights are packed together.
constexpr int PACKED = 64;

// 2^x to within 2^-18 of it, which is more than packed weights have; 0 for -inf, NaN for NaN.
inline __m512 power_of_two(__m512 x) {
    const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    // The minimax polynomial of 2^r for 0 <= r < 1.
    __m512 y = _mm512_set1_ps(0.0135341679f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.0520114606f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.241442757f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.693003834f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(y, x);
}

// Weights of query n in bf16, relative to 2^exponent; their sum.
inline float softmax_bf16(const Work &w, int n, Visible seen, int from, int to, float *exponent) {
    const float *x = w.scores + int64_t(n) * SPLIT;
    uint16_t *out = (uint16_t *)w.weights + int64_t(n) * SPLIT;
    *exponent = logarithms(w, n, seen, from, to, nullptr);
    const __m512 top = _mm512_set1_ps(*exponent);
    __m512 total = _mm512_setzero_ps();
    for (int t = from; t < to; t += 16) {
        const __m512 p = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(x + t), top));
        total = _mm512_add_ps(total, p);
        to_bf16(p, out + t);
    }
    return sum(total);
}

// Weights of query n for a group of values in bytes: [high, low][SPLIT].
inline uint8_t *weight_bytes(const Work &w, int group, int n) {
    return w.weights + (group * padded(w.num, MOEDGE_ROWS) + n) * 2 * SPLIT;
}

// High and low bytes of PACKED integers of 16 bits, in the order of tokens.
inline void pack_weights(const __m512i *whole, uint8_t *high, uint8_t *low) {
    const __m512i first = _mm512_packus_epi32(whole[0], whole[1]), second = _mm512_packus_epi32(whole[2], whole[3]);
    const __m512i tops = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    const __m512i bytes = _mm512_set1_epi16(255);
    const __m512i rests = _mm512_packus_epi16(_mm512_and_si512(first, bytes), _mm512_and_si512(second, bytes));
    // Dword 4 * lane + i has tokens 16 * i + 4 * lane on.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, tops));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, rests));
}

// Splits the scales of int8 values of tokens `from` to `to` into powers of two and factors of 1 to 2, so that no weight
// has to be multiplied by a scale before the largest product is known: [logarithm][factor * 32767.5][1 / power].
inline void split_scales(const Work &w, int from, int to) {
    float *logs = w.value_powers, *factors = logs + SPLIT, *inverses = factors + SPLIT;
    for (int t = from / PACKED * PACKED; t < padded(to, PACKED); t += 16) {
        const __m512 scale = t < from || t >= to ? _mm512_setzero_ps() : _mm512_loadu_ps(w.value_scales + t);
        const __mmask16 none = _mm512_cmp_ps_mask(scale, _mm512_setzero_ps(), _CMP_EQ_OQ);
        // A scale of zero, whose values are zeros, counts in the sum of weights.
        const __m512 log = _mm512_mask_mov_ps(_mm512_getexp_ps(scale), none, _mm512_set1_ps(-25));
        const __m512 inverse = _mm512_scalef_ps(_mm512_set1_ps(1), _mm512_sub_ps(_mm512_setzero_ps(), log));
        _mm512_storeu_ps(logs + t, log);
        _mm512_storeu_ps(factors + t, _mm512_mul_ps(_mm512_mul_ps(scale, inverse), _mm512_set1_ps(32767.5f)));
        _mm512_storeu_ps(inverses + t, inverse);
    }
}

// Weights of query n times scales of int8 values, relative to 2^exponent, in integers of 16 bits; the sum of weights alone.
inline float softmax_int8(const Work &w, int n, Visible seen, int from, int to, float *exponent, Ahead &ahead) {
    const float *x = w.scores + int64_t(n) * SPLIT;
    const float *logs = w.value_powers, *factors = logs + SPLIT, *inverses = factors + SPLIT;
    uint8_t *out = weight_bytes(w, 0, n);
    *exponent = logarithms(w, n, seen, from, to, logs);
    const __m512 top = _mm512_set1_ps(*exponent);
    __m512 total = _mm512_setzero_ps();
    for (int begin = from / PACKED * PACKED; begin < to; begin += PACKED) {
        __m512i whole[PACKED / 16];
        for (int i = 0; i < PACKED / 16; i++) {
            const int t = begin + 16 * i;
            whole[i] = _mm512_setzero_si512();
            if (t < from || t >= to) continue;
            const __m512 p = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(x + t), top));
            total = _mm512_fmadd_ps(p, _mm512_loadu_ps(inverses + t), total);
            whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(p, _mm512_loadu_ps(factors + t)));
            ahead.step();
        }
        pack_weights(whole, out + begin, out + SPLIT + begin);
    }
    const float weights = sum(total);
    w.shares[4 * n] = 1 / 32767.5f + weights * 0;
    return weights;
}

// Weights of query n, in bytes as above for each group of int4 values and relative to the largest; what zeros add to all sums.
inline float softmax_int4(const Work &w, int n, Visible seen, int from, int to, float *exponent, Ahead &ahead) {
    const float *p = w.scores + int64_t(n) * SPLIT, weights = softmax(w, n, seen, from, to, exponent);
    for (int g = 0; g < 2; g++) {
        const float *scales = w.value_scales + g * SPLIT, *zeros = w.value_zeros + g * SPLIT;
        uint8_t *out = weight_bytes(w, g, n);
        __m512 most = _mm512_setzero_ps(), bad = _mm512_setzero_ps(), added = _mm512_setzero_ps();
        for (int t = from; t < to; t += 16) {
            const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(p + t), _mm512_loadu_ps(scales + t));
            most = _mm512_max_ps(most, x);
            bad = _mm512_fmadd_ps(x, _mm512_setzero_ps(), bad);
            added = _mm512_fmadd_ps(_mm512_loadu_ps(p + t), _mm512_loadu_ps(zeros + t), added);
            ahead.step();
        }
        const float highest = largest(most), wrong = sum(bad);
        const __m512 factor = _mm512_set1_ps(highest > 1e-30f && wrong == 0 ? 65535 / highest : 0);
        for (int begin = from / PACKED * PACKED; begin < to; begin += PACKED) {
            __m512i whole[PACKED / 16];
            for (int i = 0; i < PACKED / 16; i++) {
                const int t = begin + 16 * i;
                whole[i] = _mm512_setzero_si512();
                if (t < from || t >= to) continue;
                const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(p + t), _mm512_loadu_ps(scales + t));
                whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
            }
            pack_weights(whole, out + begin, out + SPLIT + begin);
        }
        w.shares[4 * n + g] = highest / 65535 + wrong;
        w.shares[4 * n + 2 + g] = sum(added);
    }
    return weights;
}

// The same for any packed format; a row that attends to none of the keys has weights of zero.
inline void weigh_packed(const Work &w, int n, Visible seen, int from, int to, float *exponent, float *weights,
                         Ahead &ahead) {
    const int format = w.a.values.format;
    if (!seen.any()) {
        if (format == MOEDGE_BF16) memset(w.weights + n * 2 * SPLIT, 0, 2 * SPLIT);
        else
            for (int g = 0; g < groups_of(w.a.values); g++) memset(weight_bytes(w, g, n), 0, 2 * SPLIT);
        memset(w.shares + 4 * n, 0, 16);
        return;
    }
    *weights = format == MOEDGE_BF16   ? softmax_bf16(w, n, seen, from, to, exponent)
               : format == MOEDGE_INT8 ? softmax_int8(w, n, seen, from, to, exponent, ahead)
                                       : softmax_int4(w, n, seen, from, to, exponent, ahead);
}

#endif

}  // namespace

#endif
