// Vectors of W floats for kernels that are compiled once for each instruction set. All of it has internal linkage.
#ifndef MOEDGE_SIMD_H
#define MOEDGE_SIMD_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

// Here, and in simd.h alone, stands what differs by width only: SIMD(name) is the intrinsic of the widest registers.
#if MOEDGE_LEVEL >= 2
#define SIMD(name) _mm512_##name
constexpr int W = 16;
using vf = __m512;
using vi = __m512i;
inline vi load_bytes(const void *p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void *p, vi x) { _mm512_storeu_si512(p, x); }
// Half and a quarter as many bytes.
inline __m256i load_half(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline __m128i load_quarter(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
// 16 bytes, in every 128 bits.
inline vi table_of(const void *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
inline vf round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// `other` where x is NaN.
inline vi unless_nan(vf x, vi kept, vi other) { return _mm512_mask_mov_epi32(kept, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), other); }
inline bool all_finite(vf x) { return _mm512_fpclass_ps_mask(x, 0x99) == 0; }
// The lowest byte of each lane.
inline void to_bytes(vi lanes, int8_t *to) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(lanes)); }
// x where a < b, else y.
inline vf where_less(vf a, vf b, vf x, vf y) { return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x); }
// Bytes times the signs of others; what they are where these are 0 is left open.
inline vi with_signs(vi bytes, vi signs) {
    const vi zero = _mm512_setzero_si512();
    return _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(signs), zero, bytes);
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
#define SIMD(name) _mm256_##name
constexpr int W = 8;
using vf = __m256;
using vi = __m256i;
inline vi load_bytes(const void *p) { return _mm256_loadu_si256((const vi *)p); }
inline void store_bytes(void *p, vi x) { _mm256_storeu_si256((vi *)p, x); }
inline __m128i load_half(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
inline __m128i load_quarter(const void *p) { return _mm_loadl_epi64((const __m128i *)p); }
inline vi table_of(const void *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
inline vf round(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vi unless_nan(vf x, vi kept, vi other) {
    return _mm256_blendv_epi8(kept, other, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline bool all_finite(vf x) {
    const vf magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    return _mm256_movemask_ps(_mm256_cmp_ps(magnitude, _mm256_set1_ps(__builtin_inff()), _CMP_NLT_UQ)) == 0;
}
inline void to_bytes(vi lanes, int8_t *to) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(words, words));
}
inline vf where_less(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline vi with_signs(vi bytes, vi signs) { return _mm256_sign_epi8(bytes, signs); }
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

inline vf load(const float *p) { return SIMD(loadu_ps)(p); }
inline void store(float *p, vf x) { SIMD(storeu_ps)(p, x); }
inline vf set1(float x) { return SIMD(set1_ps)(x); }
inline vf add(vf a, vf b) { return SIMD(add_ps)(a, b); }
inline vf sub(vf a, vf b) { return SIMD(sub_ps)(a, b); }
inline vf mul(vf a, vf b) { return SIMD(mul_ps)(a, b); }
inline vf div(vf a, vf b) { return SIMD(div_ps)(a, b); }
inline vf fma(vf a, vf b, vf c) { return SIMD(fmadd_ps)(a, b, c); }
// The second where either is NaN.
inline vf max(vf a, vf b) { return SIMD(max_ps)(a, b); }
inline vf min(vf a, vf b) { return SIMD(min_ps)(a, b); }

inline vi all_bytes(int x) { return SIMD(set1_epi8)(char(x)); }
inline vi all_words(int x) { return SIMD(set1_epi16)(short(x)); }
inline vi all_lanes(int x) { return SIMD(set1_epi32)(x); }
inline vi mask(vi x, vi bits) { return x & bits; }
inline vi high_nibbles(vi x) { return mask(SIMD(srli_epi16)(x, 4), all_bytes(15)); }
inline vi absolute(vi bytes) { return SIMD(abs_epi8)(bytes); }
inline vi add_words(vi a, vi b) { return SIMD(add_epi16)(a, b); }
inline vi add_lanes(vi a, vi b) { return SIMD(add_epi32)(a, b); }
inline vi left_by(vi lanes, int bits) { return SIMD(slli_epi32)(lanes, bits); }
inline vi right_by(vi lanes, int bits) { return SIMD(srli_epi32)(lanes, bits); }
inline vi pairs_of_products(vi bytes, vi integers) { return SIMD(maddubs_epi16)(bytes, integers); }
inline vi sums_of_pairs(vi words, vi factors) { return SIMD(madd_epi16)(words, factors); }
inline vi looked_up(vi table, vi codes) { return SIMD(shuffle_epi8)(table, codes); }
inline vf to_floats(vi lanes) { return SIMD(cvtepi32_ps)(lanes); }
// Rounded to the nearest, to even in the middle.
inline vi to_integers(vf x) { return SIMD(cvtps_epi32)(x); }

// Casts between vectors of the same size keep bits.
inline vf abs(vf x) { return (vf)((vi)x & all_lanes(0x7fffffff)); }
inline vf copysign(vf x, vf from) { return (vf)((vi)abs(x) | ((vi)from & all_lanes(int(0x80000000u)))); }
inline vf from_half(const uint16_t *p) { return SIMD(cvtph_ps)(load_half(p)); }
inline vf from_bf16(const uint16_t *p) { return (vf)left_by(SIMD(cvtepu16_epi32)(load_half(p)), 16); }
inline vf from_int8(const int8_t *p) { return to_floats(SIMD(cvtepi8_epi32)(load_quarter(p))); }
inline vi from_bytes(const uint8_t *p) { return SIMD(cvtepu8_epi32)(load_quarter(p)); }
// Pairs of bytes as the lower and the upper half of lanes.
inline vi pairs_of_words(const uint8_t *p) { return SIMD(cvtepu8_epi16)(load_half(p)); }
inline vf from_low(const uint8_t *p) { return to_floats(from_bytes(p) & all_lanes(15)); }
inline vf from_high(const uint8_t *p) { return to_floats(right_by(from_bytes(p), 4)); }

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
    const vf power = (vf)left_by(add_lanes(to_integers(whole), all_lanes(127)), 23);
    return _mm256_blendv_ps(mul(y, power), set1(0.0f), _mm256_cmp_ps(x, set1(-126.0f), _CMP_LT_OQ));
#endif
}

inline float exp2(float x) {
    float lanes[W];
    store(lanes, exp2(set1(x)));
    return lanes[0];
}

// e^x for x of at most 87, and e^87 beyond; to within 2^-22 and what rounding x * log2(e) makes. NaN for NaN.
inline vf exponential(vf x) { return exp2(mul(min(set1(87.0f), x), set1(1.44269504f))); }

inline float exponential(float x) { return exp2(x * 1.44269504f); }

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

// W of them, in the upper 16 bits of lanes.
inline vi bf16_lanes(vf x) {
    const vi bits = (vi)x, odd = right_by(bits, 16) & all_lanes(1);
    const vi rounded = add_lanes(bits, add_lanes(odd, all_lanes(0x7fff)));
    return unless_nan(x, rounded, bits | all_lanes(64 << 16));
}

inline void to_bf16(vf x, uint16_t *to) {
#if MOEDGE_LEVEL >= 3
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
#elif MOEDGE_LEVEL >= 2
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(right_by(bf16_lanes(x), 16)));
#else
    const vi words = right_by(bf16_lanes(x), 16);
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#endif
}

inline uint16_t float_to_half(float x) {
    return uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
}

}  // namespace

#endif
