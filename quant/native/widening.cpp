// Widens rows of MXFP4 to bfloat16, which is exact. quant/native/calls.py calls it.
//
// Compiled for every instruction set, and for processors without AVX2, with and without SSSE3. The bits are those of a
// product of level and power of two: infinite where that overflows, subnormal where it is small, and a zero keeps its sign.
#include <immintrin.h>

#include "moedge_cpu.h"

namespace {

constexpr int64_t GROUP = 32, CODES = 16;
// The scale that means NaN, and the number that it makes of every code.
constexpr int NAN_SCALE = 255, NOT_A_NUMBER = 0x7fc0;

// The number of a code and a scale, as bits of bfloat16.
constexpr uint16_t number_of(int code, int scale) {
    const int halves[] = {0, 1, 2, 3, 4, 6, 8, 12};  // of the level without its sign
    const int sign = (code & 8) << 12, magnitude = halves[code & 7];
    if (scale == NAN_SCALE) return NOT_A_NUMBER;
    if (magnitude == 0) return uint16_t(sign);
    int bits = 0;  // behind the first
    while (magnitude >> (bits + 1)) bits++;
    const int exponent = scale - 1 + bits;
    if (exponent >= 255) return uint16_t(sign | 0x7f80);
    if (exponent <= 0) return uint16_t(sign | magnitude << (scale + 5));
    return uint16_t(sign | exponent << 7 | (magnitude << (7 - bits) & 0x7f));
}

#if MOEDGE_LEVEL >= 2
// The numbers of all codes of every scale.
struct Tables {
    alignas(64) uint16_t numbers[256][16] = {};

    constexpr Tables() {
        for (int scale = 0; scale < 256; scale++)
            for (int code = 0; code < 16; code++) numbers[scale][code] = number_of(code, scale);
    }
};
constexpr Tables TABLES;

inline void widen_group(const uint8_t* codes, int scale, uint16_t* to) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    // Both codes of a byte in the low four bits of their numbers; the fifth bit is any, since the table is there twice.
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)TABLES.numbers[scale]));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(both, table));
}
#else
// The lower and the upper bytes of the numbers of all codes of every scale.
struct Tables {
    alignas(16) uint8_t bytes[256][2][16] = {};

    constexpr Tables() {
        for (int scale = 0; scale < 256; scale++)
            for (int code = 0; code < 16; code++) {
                bytes[scale][0][code] = uint8_t(number_of(code, scale));
                bytes[scale][1][code] = uint8_t(number_of(code, scale) >> 8);
            }
    }
};
constexpr Tables TABLES;

#ifdef __SSSE3__
inline void widen_group(const uint8_t* from, int scale, uint16_t* to) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)from), four = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, four), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), four);
    const __m128i first = _mm_unpacklo_epi8(low, high), second = _mm_unpackhi_epi8(low, high);
    const __m128i lower = _mm_load_si128((const __m128i*)TABLES.bytes[scale][0]);
    const __m128i upper = _mm_load_si128((const __m128i*)TABLES.bytes[scale][1]);
#ifdef __AVX2__
    const __m256i codes = _mm256_set_m128i(second, first);
    const __m256i lowers = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(lower), codes);
    const __m256i uppers = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(upper), codes);
    const __m256i even = _mm256_unpacklo_epi8(lowers, uppers), odd = _mm256_unpackhi_epi8(lowers, uppers);
    _mm256_storeu_si256((__m256i*)to, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256((__m256i*)(to + 16), _mm256_permute2x128_si256(even, odd, 0x31));
#else
    const __m128i halves[] = {first, second};
    for (const __m128i codes : halves) {
        const __m128i lowers = _mm_shuffle_epi8(lower, codes), uppers = _mm_shuffle_epi8(upper, codes);
        _mm_storeu_si128((__m128i*)to, _mm_unpacklo_epi8(lowers, uppers));
        _mm_storeu_si128((__m128i*)(to + 8), _mm_unpackhi_epi8(lowers, uppers));
        to += 16;
    }
#endif
}
#else
inline void widen_group(const uint8_t* from, int scale, uint16_t* to) {
    const auto& [lower, upper] = TABLES.bytes[scale];
    for (int64_t i = 0; i < GROUP; i++) {
        const int code = from[i / 2] >> (i % 2 * 4) & 15;
        to[i] = uint16_t(lower[code] | upper[code] << 8);
    }
}
#endif
#endif

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_widen)(const moedge_widening* widening) {
    const int64_t rows = widening->rows, columns = widening->columns;
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t* codes = widening->codes + r * widening->code_stride;
        const uint8_t* scales = widening->scales + r * widening->scale_stride;
        uint16_t* to = widening->out + r * columns;
        for (int64_t g = 0; g < columns / GROUP; g++) widen_group(codes + g * CODES, scales[g], to + g * GROUP);
    }
}
