// Dequantizes blocks of GGUF's types to float32, with the operations and the bits of the gguf package (gguf/quants.py,
// whose layouts these are), and bytes by a table. quant/native/calls.py calls it.
#include "moedge_cpu.h"
#include "simd.h"

namespace {

constexpr int LARGE = 256;  // weights of a block of a K-quant
constexpr float HALVES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // of E2M1
constexpr float NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <typename T>
inline T read(const uint8_t* p) {
    T x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

inline float half(const uint8_t* p) { return half_to_float(read<uint16_t>(p)); }

inline void q4_0(const uint8_t* block, float* y) {
    const float scale = half(block);
    const uint8_t* codes = block + 2;
    for (int i = 0; i < 16; i++) {
        y[i] = scale * float(int(codes[i] & 15) - 8);
        y[i + 16] = scale * float(int(codes[i] >> 4) - 8);
    }
}

inline void q8_0(const uint8_t* block, float* y) {
    const float scale = half(block);
    for (int i = 0; i < 32; i++) y[i] = scale * float(int8_t(block[2 + i]));
}

inline void q4_1(const uint8_t* block, float* y) {
    const float scale = half(block), least = half(block + 2);
    const uint8_t* codes = block + 4;
    for (int i = 0; i < 16; i++) {
        y[i] = scale * float(codes[i] & 15) + least;
        y[i + 16] = scale * float(codes[i] >> 4) + least;
    }
}

inline void q5_0(const uint8_t* block, float* y) {
    const float scale = half(block);
    const uint32_t bits = read<uint32_t>(block + 2);
    const uint8_t* codes = block + 6;
    for (int i = 0; i < 16; i++) {
        y[i] = scale * float(int(codes[i] & 15) + int(bits >> i & 1) * 16 - 16);
        y[i + 16] = scale * float(int(codes[i] >> 4) + int(bits >> (i + 16) & 1) * 16 - 16);
    }
}

inline void q5_1(const uint8_t* block, float* y) {
    const float scale = half(block), least = half(block + 2);
    const uint32_t bits = read<uint32_t>(block + 4);
    const uint8_t* codes = block + 8;
    for (int i = 0; i < 16; i++) {
        y[i] = scale * float(int(codes[i] & 15) + int(bits >> i & 1) * 16) + least;
        y[i + 16] = scale * float(int(codes[i] >> 4) + int(bits >> (i + 16) & 1) * 16) + least;
    }
}

inline void q2_k(const uint8_t* block, float* y) {
    const uint8_t *scales = block, *codes = block + 16;
    const float d = half(block + 80), dmin = half(block + 82);
    for (int run = 0; run < 8; run++)
        for (int part = 0; part < 2; part++) {
            const uint8_t packed = scales[2 * run + part];
            const float scale = d * float(packed & 15), least = dmin * float(packed >> 4);
            const uint8_t* from = codes + run / 4 * 32 + part * 16;
            float* to = y + run * 32 + part * 16;
            for (int i = 0; i < 16; i++) to[i] = scale * float(from[i] >> (run % 4 * 2) & 3) - least;
        }
}

inline void q3_k(const uint8_t* block, float* y) {
    const uint8_t *third = block, *codes = block + 32, *scales = block + 96;
    const float d = half(block + 108);
    for (int run = 0; run < 8; run++)
        for (int part = 0; part < 2; part++) {
            const int g = 2 * run + part;
            const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4, high = scales[8 + g % 4] >> (g / 4 * 2) & 3;
            const float scale = d * float((low | high << 4) - 32);
            const uint8_t *from = codes + run / 4 * 32 + part * 16, *bits = third + part * 16;
            float* to = y + run * 32 + part * 16;
            for (int i = 0; i < 16; i++)
                to[i] = scale * float(int(from[i] >> (run % 4 * 2) & 3) - 4 + int(bits[i] >> run & 1) * 4);
        }
}

// Scale and zero of run `run` of eight, six bits each in twelve bytes.
inline void six_bits(const uint8_t* p, int run, int* scale, int* zero) {
    if (run < 4) {
        *scale = p[run] & 63, *zero = p[run + 4] & 63;
    } else {
        *scale = (p[run + 4] & 15) | (p[run - 4] >> 2 & 48);
        *zero = p[run + 4] >> 4 | (p[run] >> 2 & 48);
    }
}

template <bool FIVE>
inline void q45_k(const uint8_t* block, float* y) {
    const float d = half(block), dmin = half(block + 2);
    const uint8_t *scales = block + 4, *fifth = block + 16, *codes = block + (FIVE ? 48 : 16);
    for (int run = 0; run < 8; run++) {
        int scale_code, zero_code;
        six_bits(scales, run, &scale_code, &zero_code);
        const float scale = d * float(scale_code), least = dmin * float(zero_code);
        const uint8_t* from = codes + run / 2 * 32;
        float* to = y + run * 32;
        for (int i = 0; i < 32; i++) {
            int code = from[i] >> (run % 2 * 4) & 15;
            if (FIVE) code |= (fifth[i] >> run & 1) << 4;
            to[i] = scale * float(code) - least;
        }
    }
}

inline void q6_k(const uint8_t* block, float* y) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    const float d = half(block + 208);
    for (int run = 0; run < 8; run++)
        for (int part = 0; part < 2; part++) {
            const float scale = d * float(int8_t(scales[2 * run + part]));
            const uint8_t* from = low + run / 4 * 64 + run % 2 * 32 + part * 16;
            const uint8_t* bits = high + run / 4 * 32 + part * 16;
            float* to = y + run * 32 + part * 16;
            for (int i = 0; i < 16; i++) {
                const int four = from[i] >> (run % 4 / 2 * 4) & 15, two = bits[i] >> (run % 4 * 2) & 3;
                to[i] = scale * float((four | two << 4) - 32);
            }
        }
}

inline void levels(const float* table, float scale, const uint8_t* codes, float* y) {
    for (int i = 0; i < 16; i++) {
        y[i] = scale * table[codes[i] & 15];
        y[i + 16] = scale * table[codes[i] >> 4];
    }
}

inline void mxfp4(const uint8_t* block, float* y) {
    // Half of the power of two, which is subnormal for the smallest ones.
    const uint32_t bits = block[0] < 2 ? 0x200000u << block[0] : uint32_t(block[0] - 1) << 23;
    levels(HALVES, read<float>((const uint8_t*)&bits), block + 1, y);
}

inline void iq4_nl(const uint8_t* block, float* y) { levels(NONLINEAR, half(block), block + 2, y); }

inline void iq4_xs(const uint8_t* block, float* y) {
    const float d = half(block);
    const uint16_t high = read<uint16_t>(block + 2);
    for (int run = 0; run < 8; run++) {
        const int scale = (block[4 + run / 2] >> (run % 2 * 4) & 15) | (high >> (2 * run) & 3) << 4;
        levels(NONLINEAR, d * float(scale - 32), block + 8 + 16 * run, y + 32 * run);
    }
}

void look_up(const moedge_blocks& given) {
    for (int64_t i = 0; i < given.count; i++) given.out[i] = given.table[given.blocks[i]];
}

template <void (*DEQUANTIZE)(const uint8_t*, float*), int NBYTES, int WEIGHTS>
void all(const moedge_blocks& given) {
    for (int64_t i = 0; i < given.count; i++) DEQUANTIZE(given.blocks + i * NBYTES, given.out + i * WEIGHTS);
}

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_dequantize)(const moedge_blocks* blocks) {
    switch (blocks->type) {
        case moedge_block_type::MXFP4: return all<mxfp4, 17, 32>(*blocks);
        case moedge_block_type::BYTE: return look_up(*blocks);
        case moedge_block_type::Q4_0: return all<q4_0, 18, 32>(*blocks);
        case moedge_block_type::Q4_1: return all<q4_1, 20, 32>(*blocks);
        case moedge_block_type::Q5_0: return all<q5_0, 22, 32>(*blocks);
        case moedge_block_type::Q5_1: return all<q5_1, 24, 32>(*blocks);
        case moedge_block_type::Q8_0: return all<q8_0, 34, 32>(*blocks);
        case moedge_block_type::Q2_K: return all<q2_k, 84, LARGE>(*blocks);
        case moedge_block_type::Q3_K: return all<q3_k, 110, LARGE>(*blocks);
        case moedge_block_type::Q4_K: return all<q45_k<false>, 144, LARGE>(*blocks);
        case moedge_block_type::Q5_K: return all<q45_k<true>, 176, LARGE>(*blocks);
        case moedge_block_type::Q6_K: return all<q6_k, 210, LARGE>(*blocks);
        case moedge_block_type::IQ4_NL: return all<iq4_nl, 18, 32>(*blocks);
        case moedge_block_type::IQ4_XS: return all<iq4_xs, 136, LARGE>(*blocks);
    }
}
