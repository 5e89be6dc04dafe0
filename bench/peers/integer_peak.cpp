// The most that a thread multiplies of codes and integers of 8 bits with AVX2: products of pairs in 16 bits and their sum,
// in registers alone, and with the loads of 4 rows and 64 codes.
//
//     g++ -O2 -mavx2 bench/peers/integer_peak.cpp -o /tmp/integer_peak && /tmp/integer_peak
#include <immintrin.h>

#include <chrono>
#include <cstdint>
#include <cstdio>

alignas(64) static int8_t inputs[4][64];
alignas(64) static uint8_t codes[8][64];

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static inline void add(__m256i& sum, __m256i code, __m256i input) {
    __m256i products;
    asm volatile("vpmaddubsw %2, %1, %0" : "=x"(products) : "x"(code), "x"(input));
    asm volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products));
}

int main() {
    __m256i sums[8] = {};
    const __m256i code = _mm256_set1_epi8(5), input = _mm256_set1_epi8(3);
    const long turns = 20000000;
    double begun = seconds();
    for (long i = 0; i < turns; i++)
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) add(sums[k], code, input);
    printf("in registers: %.0f GOP/s\n", turns * 8 * 64 / (seconds() - begun) / 1e9);
    begun = seconds();
    for (long i = 0; i < turns / 8; i++)
#pragma GCC unroll 8
        for (int q = 0; q < 8; q++) {
            __m256i low, high, four;
            asm volatile("vmovdqa %1, %0" : "=x"(low) : "m"(codes[q][0]));
            asm volatile("vmovdqa %1, %0" : "=x"(high) : "m"(codes[q][32]));
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                asm volatile("vpbroadcastd %1, %0" : "=x"(four) : "m"(inputs[r][4 * q]));
                add(sums[2 * r], low, four);
                add(sums[2 * r + 1], high, four);
            }
        }
    printf("with loads: %.0f GOP/s\n", turns * 8 * 64 / (seconds() - begun) / 1e9);
}
