// Vectors of W floats for kernels that are compiled once for each instruction set. All of it has internal linkage.
#ifndef MOEDGE_SIMD_H
#define MOEDGE_SIMD_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

#if MOEDGE_LEVEL >= 2

constexpr int W = 16;
using vf = __m512;
inline vf load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, vf x) { _mm512_storeu_ps(p, x); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// The second where either is NaN.
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf abs(vf x) { return _mm512_abs_ps(x); }
inline vf copysign(vf x, vf from) {
    const __m512i sign = _mm512_set1_epi32(int(0x80000000u));
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(sign, _mm512_castps_si512(from), _mm512_castps_si512(x), 0xca));
}
inline vf from_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
inline vf from_bf16(const uint16_t *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline vf from_int8(const int8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
inline vf from_low(const uint8_t *p) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtepi32_ps(_mm512_and_si512(wide, _mm512_set1_epi32(15)));
}
inline vf from_high(const uint8_t *p) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(wide, 4));
}
// A sum in a fixed order.
inline float sum(vf x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
// Any of them where one is NaN.
inline float largest(vf x) { return _mm512_reduce_max_ps(x); }

#else

constexpr int W = 8;
using vf = __m256;
inline vf load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, vf x) { _mm256_storeu_ps(p, x); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf round(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf abs(vf x) { return _mm256_andnot_ps(set1(-0.0f), x); }
inline vf copysign(vf x, vf from) { return _mm256_or_ps(x, _mm256_and_ps(set1(-0.0f), from)); }
// x where x >= bound or x is NaN, else `other`.
inline vf keep_from(vf x, float bound, vf kept, vf other) {
    return _mm256_blendv_ps(kept, other, _mm256_cmp_ps(x, set1(bound), _CMP_LT_OQ));
}
// 2^n of integers as floats, -126 to 127.
inline vf power(vf n) {
    const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
inline vf from_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
inline vf from_bf16(const uint16_t *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline vf from_int8(const int8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
inline vf from_low(const uint8_t *p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)));
}
inline vf from_high(const uint8_t *p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4));
}
inline float sum(vf x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(vf x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

#endif

// 2^x to within 2^-22, 0 or less than 2^-125 below 2^-126, NaN for NaN. x is at most 127.
inline vf exp2(vf x) {
    const vf bounded = max(set1(MOEDGE_LEVEL >= 2 ? -200.0f : -126.0f), x);
    const vf whole = round(bounded), rest = sub(bounded, whole);
    // Taylor's series of 2^r for |r| <= 1/2.
    vf y = set1(1.5252734e-5f);
    y = fma(y, rest, set1(1.5403530e-4f));
    y = fma(y, rest, set1(1.3333558e-3f));
    y = fma(y, rest, set1(9.6181291e-3f));
    y = fma(y, rest, set1(5.5504109e-2f));
    y = fma(y, rest, set1(2.4022651e-1f));
    y = fma(y, rest, set1(6.9314718e-1f));
    y = fma(y, rest, set1(1.0f));
#if MOEDGE_LEVEL >= 2
    return _mm512_scalef_ps(y, whole);
#else
    return keep_from(x, -126.0f, mul(y, power(whole)), set1(0.0f));
#endif
}

inline float exp2(float x) {
    float lanes[W];
    store(lanes, exp2(set1(x)));
    return lanes[0];
}

// tanh(x) to within 2^-22.
inline vf tanh(vf x) {
    const vf small = exp2(mul(abs(x), set1(-2.0f * 1.44269504f)));
    return copysign(div(sub(set1(1.0f), small), add(set1(1.0f), small)), x);
}

inline float half_to_float(uint16_t x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x))); }

inline float bf16_to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Rounded to the nearest, to even in the middle; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 64);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// W of them.
inline void to_bf16(vf x, uint16_t *to) {
#if MOEDGE_LEVEL >= 3
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
#elif MOEDGE_LEVEL >= 2
    const __m512i bits = _mm512_castps_si512(x), one = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(one, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(64 << 16));
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
#else
    float lanes[W];
    store(lanes, x);
    for (int i = 0; i < W; i++) to[i] = float_to_bf16(lanes[i]);
#endif
}

inline uint16_t float_to_half(float x) {
    return uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
}

}  // namespace

#endif
