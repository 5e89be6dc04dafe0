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

template <int N>
struct Constant {
    static constexpr int value = N;
};

// Calls `use` with the format as a constant.
template <class Use>
inline void with_format(int format, Use use) {
    switch (format) {
        case MOEDGE_FP32: return use(Constant<MOEDGE_FP32>());
        case MOEDGE_BF16: return use(Constant<MOEDGE_BF16>());
        case MOEDGE_FP16: return use(Constant<MOEDGE_FP16>());
        case MOEDGE_INT8: return use(Constant<MOEDGE_INT8>());
        default: return use(Constant<MOEDGE_INT4>());
    }
}

// Vectors in a format, by token; `half` is a group's width of INT4.
template <int FORMAT>
struct Cached {
    const uint8_t *const *rows;
    const float *scales, *zeros;
    int half;

    // Elements `i` to `i + W`, as widen_vector makes them.
    vf at(int token, int i) const {
        const uint8_t *codes = rows[token];
        if (FORMAT == MOEDGE_FP32) return load((const float *)codes + i);
        if (FORMAT == MOEDGE_BF16) return from_bf16((const uint16_t *)codes + i);
        if (FORMAT == MOEDGE_FP16) return from_half((const uint16_t *)codes + i);
        if (FORMAT == MOEDGE_INT8) return mul(from_int8((const int8_t *)codes + i), set1(scales[token]));
        const float *scale = scales + token, *zero = zeros + token;
        if (i < half) return fma(from_low(codes + i), set1(*scale), set1(*zero));
        return fma(from_high(codes + i - half), set1(scale[SPLIT]), set1(zero[SPLIT]));
    }
};

// Queries that meet a vector while it is in a register, as many as leave registers for what they add up, with KEYS keys or
// WIDE vectors of values. Of more queries than MOST_DIRECT, widening a vector once for all of them is faster.
constexpr int AT_ONCE = 3, KEYS = 4, WIDE = 4, MOST_DIRECT = 8;

inline bool is_direct(const Work &w, const moedge_vectors &v) {
    return w.num <= MOST_DIRECT && v.width % (v.format == MOEDGE_INT4 ? 2 * W : W) == 0;
}

inline int num_blocks(int queries) { return (queries + AT_ONCE - 1) / AT_ONCE; }

// Calls use(first, how many) for blocks of all queries, with how many as a constant.
template <class Use>
inline void each_block(int queries, Use use) {
    const int blocks = num_blocks(queries), most = (queries + blocks - 1) / blocks;
    for (int n = 0; n < queries; n += most) switch (queries - n < most ? queries - n : most) {
            case 1: use(n, Constant<1>()); break;
            case 2: use(n, Constant<2>()); break;
            default: use(n, Constant<3>());
        }
}

// sum(x[0]) to sum(x[3]), with the same bits.
inline void store_sums(const vf (&x)[4], float *to, bool add_up) {
#if MOEDGE_LEVEL >= 2
    for (int j = 0; j < 4; j++) to[j] = sum(x[j]) + (add_up ? to[j] : 0.0f);
#else
    const auto halves = [](vf a, vf b) { return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)); };
    const vf first = halves(x[0], x[1]), second = halves(x[2], x[3]);
    const vf pairs = add(_mm256_shuffle_ps(first, second, 0x44), _mm256_shuffle_ps(first, second, 0xee));
    const vf sums = add(_mm256_shuffle_ps(pairs, pairs, 0x88), _mm256_shuffle_ps(pairs, pairs, 0xdd));
    const __m128 four = _mm_unpacklo_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    _mm_storeu_ps(to, add_up ? _mm_add_ps(four, _mm_loadu_ps(to)) : four);
#endif
}

// Scores [COUNT][SPLIT] of TILE keys of `length` elements for queries [COUNT][stride].
template <int COUNT, int FORMAT>
inline void score_block(const Cached<FORMAT> &keys, int length, const float *queries, int64_t stride, float *scores, bool add_up,
                        Ahead &ahead) {
    for (int t = 0; t < TILE; t += KEYS) {
        vf dots[COUNT][KEYS];
        for (int n = 0; n < COUNT; n++)
            for (int j = 0; j < KEYS; j++) dots[n][j] = set1(0);
        for (int d = 0; d < length; d += W) {
            vf x[COUNT];
            for (int n = 0; n < COUNT; n++) x[n] = load(queries + n * stride + d);
            for (int j = 0; j < KEYS; j++) {
                const vf key = keys.at(t + j, d);
                for (int n = 0; n < COUNT; n++) dots[n][j] = fma(x[n], key, dots[n][j]);
            }
        }
        for (int n = 0; n < COUNT; n++) store_sums(dots[n], scores + n * SPLIT + t, add_up);
        ahead.step();
    }
}

// Scores of the keys `from` to `to` of a split, whose number is a multiple of TILE.
inline void score_float(const Work &w, int part, int from, int to, const float *queries, bool add_up, Ahead &ahead) {
    const moedge_vectors &v = w.a.keys[part];
    const int64_t stride = padded_width(v);
    const auto score = [&](auto keys, int t, int length) {
        each_block(w.num, [&](int n, auto count) {
            float *scores = w.scores + int64_t(n) * SPLIT + t;
            score_block<count.value>(keys, length, queries + n * stride, stride, scores, add_up, ahead);
        });
    };
    ahead.spread(int64_t(num_blocks(w.num)) * (to - from) / KEYS);
    if (is_direct(w, v)) {
        with_format(v.format, [&](auto format) {
            for (int t = from; t < to; t += TILE)
                score(Cached<format.value>{w.rows + t, w.scales + t, w.zeros + t, v.width / 2}, t, v.width);
        });
        return;
    }
    const int length = int(padded(v.width, 16));
    const uint8_t *rows[TILE];
    for (int t = from; t < to; t += TILE) {
        for (int i = 0; i < TILE; i++) {
            float *key = w.tile + i * stride;
            memset(key + v.width, 0, (length - v.width) * sizeof(float));
            widen_vector(v, w.rows[t + i], w.scales, w.zeros, t + i, key);
            rows[i] = (const uint8_t *)key;
        }
        score(Cached<MOEDGE_FP32>{rows, nullptr, nullptr, 0}, t, length);
    }
}

// Adds to MANY vectors of sums [COUNT][stride] from element `d` what weights [COUNT][SPLIT] times `count` values are.
template <int COUNT, int MANY, int FORMAT>
inline void sum_block(const Cached<FORMAT> &values, int count, int d, const float *weights, int64_t stride, float *sums,
                      Ahead &ahead) {
    vf added[COUNT][MANY];
    for (int n = 0; n < COUNT; n++)
        for (int j = 0; j < MANY; j++) added[n][j] = load(sums + n * stride + d + j * W);
    for (int i = 0; i < count; i++) {
        vf p[COUNT];
        for (int n = 0; n < COUNT; n++) p[n] = set1(weights[n * SPLIT + i]);
        for (int j = 0; j < MANY; j++) {
            const vf value = values.at(i, d + j * W);
            for (int n = 0; n < COUNT; n++) added[n][j] = fma(p[n], value, added[n][j]);
        }
        if (MANY == WIDE) ahead.step();
    }
    for (int n = 0; n < COUNT; n++)
        for (int j = 0; j < MANY; j++) store(sums + n * stride + d + j * W, added[n][j]);
}

// sums [Q][stride] of weights [Q][SPLIT] times the values of tokens `from` to `to`.
inline void sum_float(const Work &w, int from, int to, Ahead &ahead) {
    const moedge_vectors &v = w.a.values;
    const int64_t stride = padded_width(v);
    memset(w.sums, 0, w.num * stride * sizeof(float));
    const auto sum = [&](auto values, int begin, int count, int length) {
        each_block(w.num, [&](int n, auto queries) {
            const float *weights = (const float *)w.weights + int64_t(n) * SPLIT + begin;
            float *sums = w.sums + n * stride;
            int d = 0;
            for (; d + WIDE * W <= length; d += WIDE * W)
                sum_block<queries.value, WIDE>(values, count, d, weights, stride, sums, ahead);
            for (; d < length; d += W) sum_block<queries.value, 1>(values, count, d, weights, stride, sums, ahead);
        });
    };
    ahead.spread(int64_t(num_blocks(w.num)) * (to - from) * (v.width / (WIDE * W)));
    if (is_direct(w, v)) {
        with_format(v.format, [&](auto format) {
            const Cached<format.value> values{w.value_rows + from, w.value_scales + from, w.value_zeros + from, v.width / 2};
            sum(values, from, to - from, v.width);
        });
        return;
    }
    const int length = int(padded(v.width, 2 * W));
    const uint8_t *rows[WIDENED];
    for (int begin = from; begin < to; begin += WIDENED) {
        const int count = to - begin < WIDENED ? to - begin : WIDENED;
        for (int i = 0; i < count; i++) {
            float *value = (float *)w.values + i * stride;
            memset(value + v.width, 0, (length - v.width) * sizeof(float));
            widen_vector(v, w.value_rows[begin + i], w.value_scales, w.value_zeros, begin + i, value);
            rows[i] = (const uint8_t *)value;
        }
        sum(Cached<MOEDGE_FP32>{rows, nullptr, nullptr, 0}, begin, count, length);
    }
}

}  // namespace

#endif
