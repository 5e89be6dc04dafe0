// Widens matrices in order `tiles` to bfloat16, row after row, for products of many rows by other kernels.
// native/calls.py calls it.
//
// A weight is value(code) * scale + zero, of PAIRS with the factor of the row in both, each operation rounded to float32 and
// the result once more to bfloat16: the bits of the codecs in torch.
#include "tiles.h"

namespace {

// 2^(exponent - 127) of W biased exponents, 255 being NaN.
inline vf exact_powers(const uint8_t* from) {
    float powers[W];
    for (int i = 0; i < W; i++) {
        const uint32_t bits = from[i] == 255 ? 0x7fc00000u : from[i] == 0 ? 1u << 22 : uint32_t(from[i]) << 23;
        memcpy(powers + i, &bits, 4);
    }
    return load(powers);
}

inline void factors_of(const Matrix& matrix, int64_t tile, int64_t group, Factors& found) {
    if (matrix.scales_type == Scales::PAIRS) {
        matrix.factors_of<Scales::PAIRS>(tile, group, found);
        for (int v = 0; v < VECTORS; v++) {
            const vf factor = load(matrix.factors + tile * OUTPUTS + v * W);
            found.scale[v] = mul(found.scale[v], factor);
            found.zero[v] = mul(found.zero[v], factor);
        }
        return;
    }
    if (matrix.scales_type != Scales::UINT8) return matrix.factors_of<ANY>(tile, group, found);
    const uint8_t* from = matrix.scales + (tile * (matrix.columns / matrix.group) + group) * OUTPUTS;
    for (int v = 0; v < VECTORS; v++) found.scale[v] = exact_powers(from + v * W);
}

// Pairs of columns [16][OUTPUTS] to rows [OUTPUTS][16], each `stride` pairs after the last.
inline void transpose(const uint32_t (&pairs)[CHUNK / 2][OUTPUTS], uint32_t* to, int64_t stride) {
#if MOEDGE_LEVEL >= 2
    for (int half = 0; half < 2; half++) {
        __m512i x[16], y[16];
        for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(pairs[i] + 16 * half);
        for (int i = 0; i < 8; i++) {
            y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
            y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
        }
        // x[4 q + j] has in lane L the row 4 L + j of the pairs 4 q to 4 q + 3.
        for (int q = 0; q < 4; q++)
            for (int j = 0; j < 2; j++) {
                x[4 * q + 2 * j] = _mm512_unpacklo_epi64(y[4 * q + j], y[4 * q + 2 + j]);
                x[4 * q + 2 * j + 1] = _mm512_unpackhi_epi64(y[4 * q + j], y[4 * q + 2 + j]);
            }
        for (int j = 0; j < 4; j++) {
            const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
            const __m512i c = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd), d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
            uint32_t* row = to + (16 * half + j) * stride;
            _mm512_storeu_si512(row, _mm512_shuffle_i32x4(a, b, 0x88));
            _mm512_storeu_si512(row + 4 * stride, _mm512_shuffle_i32x4(c, d, 0x88));
            _mm512_storeu_si512(row + 8 * stride, _mm512_shuffle_i32x4(a, b, 0xdd));
            _mm512_storeu_si512(row + 12 * stride, _mm512_shuffle_i32x4(c, d, 0xdd));
        }
    }
#else
    for (int row = 0; row < OUTPUTS; row++)
        for (int i = 0; i < CHUNK / 2; i++) to[row * stride + i] = pairs[i][row];
#endif
}

template <Type VALUES>
void widen_tile(const Matrix& matrix, int64_t tile, uint32_t* to) {
    const bool has_zeros = matrix.scales_type == Scales::PAIRS || matrix.zeros != nullptr;
    const FloatCodes<VALUES> codes(matrix.codes + tile * (matrix.columns / 2) * FloatCodes<VALUES>::NBYTES);
    for (int64_t chunk = 0; chunk < matrix.columns / CHUNK; chunk++) {
        Factors factors;
        factors_of(matrix, tile, chunk * CHUNK / matrix.group, factors);
        alignas(64) uint32_t pairs[CHUNK / 2][OUTPUTS];
        for (int p = 0; p < CHUNK / 2; p++) {
            FloatPair pair;
            codes.prefetch(chunk * (CHUNK / 2) + p);
            codes.pair(chunk * (CHUNK / 2) + p, pair);
            for (int v = 0; v < VECTORS; v++) {
                vf first = mul(pair.values[0][v], factors.scale[v]), second = mul(pair.values[1][v], factors.scale[v]);
                if (has_zeros) {
                    first = add(first, factors.zero[v]);
                    second = add(second, factors.zero[v]);
                }
                store_bytes(pairs[p] + v * W, right_by(bf16_lanes(first), 16) | (bf16_lanes(second) & all_lanes(int(0xffff0000))));
            }
        }
        transpose(pairs, to + chunk * (CHUNK / 2), matrix.columns / 2);
    }
}

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_widen_tiles)(const moedge_tiles_widening* widening) {
    const Matrix matrix(widening->weights);
    for (int64_t tile = 0; tile < matrix.tiles(); tile++) {
        uint32_t* to = (uint32_t*)widening->out + tile * OUTPUTS * matrix.columns / 2;
        switch (matrix.type) {
            case Type::INT4: widen_tile<Type::INT4>(matrix, tile, to); break;
            case Type::NF4: widen_tile<Type::NF4>(matrix, tile, to); break;
            case Type::E2M1: widen_tile<Type::E2M1>(matrix, tile, to); break;
            case Type::INT3: widen_tile<Type::INT3>(matrix, tile, to); break;
            case Type::VQ2: widen_tile<Type::VQ2>(matrix, tile, to); break;
            case Type::INT8: widen_tile<Type::INT8>(matrix, tile, to); break;
            case Type::BF16: break;  // What the others become.
        }
    }
}
