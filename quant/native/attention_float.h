// Attention's products in float32, over keys and values of every format: for instruction sets without faster ones, and
// for activations that need all bits.
#ifndef MOEDGE_ATTENTION_FLOAT_H
#define MOEDGE_ATTENTION_FLOAT_H

#include "attention_work.h"

namespace {

// Values that are widened together.
constexpr int WIDENED = 128;

// Fills out with the `n` elements that `from` makes of codes, code * scale + zero, and zeros up to a multiple of 16.
template <class From>
inline void widen(From from, int n, float scale, float zero, float *out) {
    const vf factor = set1(scale), shift = set1(zero);
    int i = 0;
    for (; i + W <= n; i += W) store(out + i, fma(from(i, W), factor, shift));
    if (i < n) {
        float last[W];
        store(last, fma(from(i, n - i), factor, shift));
        memcpy(out + i, last, (n - i) * sizeof(float));
    }
}

template <class T>
inline const T *whole(const uint8_t *codes, int i, int count, T *last) {
    const T *begin = (const T *)codes + i;
    if (count == W) return begin;
    memset(last, 0, W * sizeof(T));
    memcpy(last, begin, count * sizeof(T));
    return last;
}

// One vector of the cache as floats [width]; scale and zero by group.
inline void widen_vector(const moedge_vectors &v, const uint8_t *codes, const float *scales, const float *zeros, int token,
                         float *out) {
    const int n = v.width;
    uint8_t last[W * 4];
    switch (v.format) {
        case MOEDGE_FP32: memcpy(out, codes, n * sizeof(float)); break;
        case MOEDGE_BF16:
            widen([&](int i, int c) { return from_bf16(whole<uint16_t>(codes, i, c, (uint16_t *)last)); }, n, 1, 0, out);
            break;
        case MOEDGE_FP16:
            widen([&](int i, int c) { return from_half(whole<uint16_t>(codes, i, c, (uint16_t *)last)); }, n, 1, 0, out);
            break;
        case MOEDGE_INT8:
            widen([&](int i, int c) { return from_int8(whole<int8_t>(codes, i, c, (int8_t *)last)); }, n, scales[token], 0,
                  out);
            break;
        default:
            widen([&](int i, int c) { return from_low(whole<uint8_t>(codes, i, c, last)); }, n / 2, scales[token],
                  zeros[token], out);
            widen([&](int i, int c) { return from_high(whole<uint8_t>(codes, i, c, last)); }, n / 2, scales[SPLIT + token],
                  zeros[SPLIT + token], out + n / 2);
    }
}

inline void pack_float(const float *q, int width, int stride, int count, float *packed) {
    for (int n = 0; n < count; n++) {
        memcpy(packed + int64_t(n) * stride, q + int64_t(n) * stride, width * sizeof(float));
        memset(packed + int64_t(n) * stride + width, 0, (stride - width) * sizeof(float));
    }
}

// Scores of one tile of keys, which start at token `t` of the split.
inline void score_float(const Work &w, int part, int t, const float *queries, bool add_up) {
    const moedge_vectors &v = w.a.keys[part];
    const int64_t stride = padded_width(v);
    const int length = int(padded(v.width, 16));
    float *keys = w.tile;
    for (int i = 0; i < TILE; i++) {
        memset(keys + i * stride + v.width, 0, (length - v.width) * sizeof(float));
        widen_vector(v, w.rows[t + i], w.scales, w.zeros, t + i, keys + i * stride);
    }
    for (int n = 0; n < w.num; n++) {
        const float *q = queries + n * stride;
        float *scores = w.scores + int64_t(n) * SPLIT + t;
        for (int i = 0; i < TILE; i += 4) {
            const float *k = keys + i * stride;
            vf dots[4] = {set1(0), set1(0), set1(0), set1(0)};
            for (int d = 0; d < length; d += W) {
                const vf x = load(q + d);
                for (int j = 0; j < 4; j++) dots[j] = fma(x, load(k + j * stride + d), dots[j]);
            }
            for (int j = 0; j < 4; j++) scores[i + j] = sum(dots[j]) + (add_up ? scores[i + j] : 0.0f);
        }
    }
}

// sums [Q][stride] of weights [Q][SPLIT] times the values of tokens `from` to `to`.
inline void sum_float(const Work &w, int from, int to) {
    const moedge_vectors &v = w.a.values;
    const int64_t stride = padded_width(v);
    const int length = int(padded(v.width, 2 * W));
    memset(w.sums, 0, w.num * stride * sizeof(float));
    for (int begin = from; begin < to; begin += WIDENED) {
        const int count = to - begin < WIDENED ? to - begin : WIDENED;
        float *values = (float *)w.values;
        for (int i = 0; i < count; i++) {
            memset(values + i * stride + v.width, 0, (length - v.width) * sizeof(float));
            widen_vector(v, w.value_rows[begin + i], w.value_scales, w.value_zeros, begin + i, values + i * stride);
        }
        for (int n = 0; n < w.num; n++) {
            const float *weights = (const float *)w.weights + int64_t(n) * SPLIT + begin;
            for (int d = 0; d < length; d += 2 * W) {
                float *out = w.sums + n * stride + d;
                vf first = load(out), second = load(out + W);
                for (int i = 0; i < count; i++) {
                    const vf p = set1(weights[i]);
                    first = fma(p, load(values + i * stride + d), first);
                    second = fma(p, load(values + i * stride + d + W), second);
                }
                store(out, first);
                store(out + W, second);
            }
        }
    }
}

}  // namespace

#endif
