// Products with matrices in order `tiles` (formats/format.py), whose codes are widened in registers.
//
// A tile has OUTPUTS rows of the matrix, all columns, and is contiguous in every plane. Columns come in chunks of CHUNK.
// A result is, in float32 and in this order whatever the other rows, tiles and threads are,
//
//     sum over groups of (scale * (sum over the group's columns of value(code) * x) + zero * (sum of the group's x)),
//
// so a row's bits depend on the row and the matrix alone.
//
// With AVX2 alone, this is so of nf4; other codes are multiplied as tiles_words.h has it. There, OUTPUTS rows of a matrix of
// bfloat16 in order `rows` are a tile, too, without scales: oneDNN, which multiplies such matrices elsewhere, wants AVX-512.
#ifndef MOEDGE_TILES_H
#define MOEDGE_TILES_H

// GCC 12 warns of its own undefined registers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "moedge_cpu.h"
#include "simd.h"

namespace {

constexpr int OUTPUTS = 32, CHUNK = 32;
// Rows that one sweep over a tile's codes serves: their inputs and sums stay in a core's second and first cache.
constexpr int64_t MOST_ROWS = MOEDGE_MOST_ROWS;
// Bytes of codes that are requested before they are multiplied.
constexpr int64_t AHEAD = 4096;
// Longer groups are summed in parts of this many columns, the last one of what is left; each part is scaled.
constexpr int64_t MOST_PART = 128;
// The columns that are widened at a time where several blocks of rows are multiplied by them: half of a first cache.
constexpr int64_t MOST_WIDENED = MOEDGE_LEVEL >= 2 ? 256 : 128;

using Type = moedge_codes;
using Scales = moedge_scales;
// Where code serves all of them.
constexpr Scales ANY = Scales(-1);
// Where there are none.
constexpr Scales ONES = Scales(-2);

// By the type of codes.
constexpr float TABLES[5][16] = {
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
    // nf4.LEVELS; bfloat16 where products are of bfloat16.
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6},
    {-4, -3, -2, -1, 0, 1, 2, 3},
    {-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f, 0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f},
};
// The entry of `TABLES` of a type; INT8 needs none.
constexpr int table_of_type(Type type) { return int(type) % 5; }

inline vf powers_of_two(const uint8_t* from) { return (vf)left_by(from_bytes(from), 23); }
inline vf small_integers(const uint8_t* from) { return to_floats(from_bytes(from)); }

constexpr int VECTORS = OUTPUTS / W;

// A byte for each code of the columns 4 q to 4 q + 3 of a chunk of three-bit codes: lanes of W outputs. The chunk has 16
// such vectors of 64 bytes, of columns and halves of the outputs: four share the bytes that have their lower two bits, and
// eight those that have the upper one (formats/tiles.py).
__attribute__((always_inline)) inline vi three_bits(const uint8_t* chunk, int q, int v) {
    const int at = 2 * q + v * W / 16;
    const uint8_t* part = chunk + v * W % 16 * 4;
    const vi low = load_bytes(part + 64 * (at / 4)), high = load_bytes(part + 256 + 64 * (at / 8));
    const int shift = 2 * (at % 4), bit = at % 8;
    const vi upper = bit < 2 ? left_by(high, 2 - bit) : right_by(high, bit - 2);
    return mask(right_by(low, shift), all_bytes(3)) | mask(upper, all_bytes(4));
}
constexpr int64_t THREE_BITS_NBYTES = CHUNK * OUTPUTS * 3 / 8;

// The same of the points of pairs (formats/vq2.py), bytes whose halves are the first and the second of two numbers: those of
// the columns 4 q and of the columns 4 (q ^ 1). The chunk has 8 vectors of 64 codes, of which two share the bytes that have
// their lower four bits, and all those that have the upper one.
constexpr uint8_t POINTS[16] = {0x61, 0x32, 0x83, 0x64, 0xa4, 0x66, 0xc6, 0x37, 0x87, 0xa7, 0x09, 0x7a, 0xba, 0xea, 0x2c, 0x5f};
constexpr uint8_t OPPOSITE[16] = {0, 0xff};

__attribute__((always_inline)) inline vi half_of_points(const uint8_t* chunk, int q, int v) {
    const int eight = q / 2, half = v * W / 16;
    const uint8_t* part = chunk + v * W % 16 * 4;
    const vi low = load_bytes(part + 64 * eight), high = load_bytes(part + 256);
    const vi codes = half ? high_nibbles(low) : mask(low, all_bytes(15));
    const vi signs = mask(right_by(high, 2 * eight + half), all_bytes(1));
    const vi points = looked_up(table_of(POINTS), codes) ^ looked_up(table_of(OPPOSITE), signs);
    return q % 2 ? high_nibbles(points) : mask(points, all_bytes(15));
}
constexpr int64_t POINTS_NBYTES = CHUNK * OUTPUTS * 5 / 16;

// A byte for each code of four columns of W outputs, of which the chunks from `at` on have a row of vectors.
template <Type VALUES>
__attribute__((always_inline)) inline vi four_columns(const uint8_t* at, uint64_t index, int v) {
    const uint64_t chunk = index / (CHUNK / 4);
    const int q = int(index % (CHUNK / 4));
    return VALUES == Type::INT3 ? three_bits(at + chunk * THREE_BITS_NBYTES, q, v) : half_of_points(at + chunk * POINTS_NBYTES, q, v);
}

// Two columns of a tile's values in float32: of column 0 and 1.
struct FloatPair {
    vf values[2][VECTORS];
};

// Two columns of a tile's values, ready to be multiplied by two numbers of every row.
#if MOEDGE_LEVEL >= 3
struct Pair {
    __m512i values[VECTORS];
};
// Rows whose sums fit the registers beside a pair and their results.
constexpr int ROWS_AT_ONCE = 6;
// Rows of a block that is multiplied by codes as they are widened, and rows up to which codes are widened again for each
// such block: of more rows, keeping widened ones is faster.
constexpr int64_t ROWS_DIRECT = 12, MOST_DIRECT = 2 * ROWS_DIRECT;

inline void add_products(vf (&sums)[VECTORS], const Pair& pair, const uint16_t* x) {
    int both;
    memcpy(&both, x, 4);
    const __m512i numbers = _mm512_set1_epi32(both);
    sums[0] = _mm512_dpbf16_ps(sums[0], (__m512bh)pair.values[0], (__m512bh)numbers);
    sums[1] = _mm512_dpbf16_ps(sums[1], (__m512bh)pair.values[1], (__m512bh)numbers);
}
#else
using Pair = FloatPair;
// Of sixteen registers twelve are sums of three rows.
constexpr int ROWS_AT_ONCE = MOEDGE_LEVEL >= 2 ? 6 : 3;
constexpr int64_t ROWS_DIRECT = ROWS_AT_ONCE, MOST_DIRECT = MOEDGE_LEVEL >= 2 ? 2 * ROWS_DIRECT : ROWS_DIRECT;

inline void add_products(vf (&sums)[VECTORS], const Pair& pair, const uint16_t* x) {
    int both;
    memcpy(&both, x, 4);
    const vi numbers = all_lanes(both);
    const vf first = (vf)left_by(numbers, 16), second = (vf)(numbers & all_lanes(int(0xffff0000)));
    for (int v = 0; v < VECTORS; v++) {
        sums[v] = fma(pair.values[0][v], first, sums[v]);
        sums[v] = fma(pair.values[1][v], second, sums[v]);
    }
}
#endif

// Makes pairs of columns from codes. The bytes of a pair of four-bit codes: byte 2 i + p has column p of row i in the
// low bits and of row 16 + i in the high bits; of eight-bit codes, byte 2 i + p has column p of row i. Those of three
// bits lie in chunks, of which a pair is a sixteenth.
template <Type VALUES>
struct FloatCodes {
    static constexpr int64_t NBYTES = VALUES == Type::INT8 ? 2 * OUTPUTS : VALUES == Type::INT3 ? OUTPUTS * 3 / 4
                                      : VALUES == Type::VQ2 ? OUTPUTS * 5 / 8 : OUTPUTS;
    // Whether all codes of a chunk are made together: shifts are then constants.
    static constexpr bool WHOLE = VALUES == Type::INT3 || VALUES == Type::VQ2;
    const uint8_t* at;

    // Lanes whose lowest byte is the code of the first of two columns, and the one above it that of the second.
    __attribute__((always_inline)) vi bytes_of_pair(int64_t index, int v) const {
        const vi four = four_columns<VALUES>(at, uint64_t(index) / 2, v);
        return uint64_t(index) % 2 ? right_by(four, 16) : four;
    }

    // Processors do not read far enough ahead on their own. What is behind the last tile is read in vain.
    void prefetch(int64_t index) const { _mm_prefetch((const char*)at + index * NBYTES + AHEAD, _MM_HINT_T0); }
#if MOEDGE_LEVEL >= 2
    __m512 table;

    explicit FloatCodes(const uint8_t* from) : at(from), table(_mm512_loadu_ps(TABLES[table_of_type(VALUES)])) {}

    __attribute__((always_inline)) void pair(int64_t index, FloatPair& out) const {
        if (WHOLE) {
            for (int v = 0; v < VECTORS; v++) {
                const vi codes = bytes_of_pair(index, v);
                out.values[0][v] = _mm512_permutexvar_ps(codes, table);
                out.values[1][v] = _mm512_permutexvar_ps(right_by(codes, 8), table);
            }
            return;
        }
        const uint8_t* from = at + index * NBYTES;
        if (VALUES == Type::INT8) {
            for (int v = 0; v < VECTORS; v++) {
                const __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)(from + OUTPUTS * v)));
                out.values[0][v] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24));
                out.values[1][v] = _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 8));
            }
            return;
        }
        const __m512i codes = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
        out.values[0][0] = _mm512_permutexvar_ps(codes, table);
        out.values[1][0] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8), table);
        out.values[0][1] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table);
        out.values[1][1] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 12), table);
    }
#else
    __m256 low, high;

    explicit FloatCodes(const uint8_t* from)
        : at(from), low(_mm256_loadu_ps(TABLES[table_of_type(VALUES)])),
          high(_mm256_loadu_ps(TABLES[table_of_type(VALUES)] + 8)) {}

    // The entries of the low four bits, of three-bit codes of the low three.
    vf looked_up(__m256i codes) const {
        if (VALUES == Type::INT3) return _mm256_permutevar8x32_ps(low, codes);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), upper);
    }

    __attribute__((always_inline)) void pair(int64_t index, FloatPair& out) const {
        if (WHOLE) {
            for (int v = 0; v < VECTORS; v++) {
                const vi codes = bytes_of_pair(index, v);
                out.values[0][v] = looked_up(codes);
                out.values[1][v] = looked_up(right_by(codes, 8));
            }
            return;
        }
        const uint8_t* from = at + index * NBYTES;
        if (VALUES == Type::INT8) {
            for (int v = 0; v < VECTORS; v++) {
                const __m256i both = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)(from + 2 * W * v)));
                out.values[0][v] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 24), 24));
                out.values[1][v] = _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 8));
            }
            return;
        }
        for (int half = 0; half < 2; half++) {
            const __m256i codes = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + 16 * half)));
            out.values[0][half] = looked_up(codes);
            out.values[1][half] = looked_up(_mm256_srli_epi32(codes, 8));
            out.values[0][half + 2] = looked_up(_mm256_srli_epi32(codes, 4));
            out.values[1][half + 2] = looked_up(_mm256_srli_epi32(codes, 12));
        }
    }
#endif
};

#if MOEDGE_LEVEL >= 3
// The same in bfloat16, exact but for the levels of nf4.
template <Type VALUES>
struct Codes {
    static constexpr int64_t NBYTES = FloatCodes<VALUES>::NBYTES;
    static constexpr bool WHOLE = FloatCodes<VALUES>::WHOLE;
    const uint8_t* at;

    void prefetch(int64_t index) const { _mm_prefetch((const char*)at + index * NBYTES + AHEAD, _MM_HINT_T0); }

    __m512i table;

    explicit Codes(const uint8_t* from) : at(from) {
        if (VALUES == Type::INT8) return;
        alignas(64) uint16_t entries[32];
        // Twice: the fifth bit of an index is a bit of another code.
        for (int i = 0; i < 32; i++) entries[i] = float_to_bf16(TABLES[table_of_type(VALUES)][i & 15]);
        table = _mm512_load_si512(entries);
    }

    static __m512i integers(const uint8_t* from) {
        const __m512i both = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
        const __m512i first = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(both, 16), 16)));
        const __m512i second = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(both, 16)));
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first, 16), second);
    }

    __attribute__((always_inline)) void pair(int64_t index, Pair& out) const {
        if (WHOLE) {
            for (int v = 0; v < VECTORS; v++) {
                const vi codes = FloatCodes<VALUES>(at).bytes_of_pair(index, v);
                const vi words = _mm512_mask_blend_epi16(0xaaaaaaaa, codes, left_by(codes, 8));
                out.values[v] = _mm512_permutexvar_epi16(words, table);
            }
            return;
        }
        const uint8_t* from = at + index * NBYTES;
        if (VALUES == Type::INT8) {
            out.values[0] = integers(from);
            out.values[1] = integers(from + OUTPUTS);
            return;
        }
        const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
        out.values[0] = _mm512_permutexvar_epi16(codes, table);
        out.values[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    }
};
#elif MOEDGE_LEVEL == 2
template <Type VALUES>
using Codes = FloatCodes<VALUES>;
#else
// The same of nf4, from tables of the upper and the lower byte of its levels in bfloat16: half of the instructions. Codes that are
// integers are multiplied as such (tiles_words.h).
template <Type VALUES>
struct Codes : FloatCodes<VALUES> {
    static_assert(VALUES == Type::NF4);
    vi upper, lower;

    explicit Codes(const uint8_t* from) : FloatCodes<VALUES>(from) {
        uint8_t bytes[2][16];
        for (int i = 0; i < 16; i++) {
            const uint16_t entry = float_to_bf16(TABLES[table_of_type(VALUES)][i]);
            bytes[0][i] = uint8_t(entry), bytes[1][i] = uint8_t(entry >> 8);
        }
        lower = table_of(bytes[0]), upper = table_of(bytes[1]);
    }

    __attribute__((always_inline)) void pair(int64_t index, FloatPair& out) const {
        // Of the quarters of 16 rows, the first and the third come from the lower half, so that they are interleaved in order.
        const vi bytes = _mm256_permute4x64_epi64(load_bytes(this->at + index * this->NBYTES), 0xd8);
        for (int half = 0; half < 2; half++) {
            const vi codes = half ? high_nibbles(bytes) : mask(bytes, all_bytes(15));
            const vi high = looked_up(upper, codes), low = looked_up(lower, codes);
            const vi both[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
            for (int v = 0; v < 2; v++) {
                out.values[0][2 * half + v] = (vf)left_by(both[v], 16);
                out.values[1][2 * half + v] = (vf)(both[v] & all_lanes(int(0xffff0000)));
            }
        }
    }
};

// Not codes, but OUTPUTS rows of bfloat16, of which a chunk is turned: lanes of a vector are outputs.
template <>
struct Codes<Type::BF16> {
    static constexpr int64_t NBYTES = 4 * OUTPUTS;
    static constexpr bool WHOLE = true;
    const uint8_t* at;
    // What is requested is, of few columns, the same of the next tile; of many, what comes soon in a row.
    int64_t row_nbytes, ahead;

    explicit Codes(const uint8_t* from, int64_t columns)
        : at(from), row_nbytes(2 * columns), ahead(columns < 1024 ? OUTPUTS * row_nbytes : 512) {}
    void prefetch(int64_t) const {}

    // Lanes of four bytes of the rows r and r + 4, then four bytes of all eight rows in turn.
    __attribute__((always_inline)) static void turn(const uint8_t* from, int64_t stride, vi (&made)[8]) {
        vi halves[2][4];
        for (int r = 0; r < 4; r++)
            for (int half = 0; half < 2; half++) {
                const uint8_t* first = from + r * stride + 16 * half;
                halves[half][r] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first)),
                                                          _mm_loadu_si128((const __m128i*)(first + 4 * stride)), 1);
            }
        for (int half = 0; half < 2; half++) {
            const vi* rows = halves[half];
            const vi a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpackhi_epi32(rows[0], rows[1]);
            const vi c = _mm256_unpacklo_epi32(rows[2], rows[3]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
            made[4 * half] = _mm256_unpacklo_epi64(a, c), made[4 * half + 1] = _mm256_unpackhi_epi64(a, c);
            made[4 * half + 2] = _mm256_unpacklo_epi64(b, d), made[4 * half + 3] = _mm256_unpackhi_epi64(b, d);
        }
    }
};
#endif

// All pairs of a chunk.
template <class Source>
__attribute__((always_inline)) inline void make_chunk(const Source& source, int64_t chunk, Pair (&made)[CHUNK / 2]) {
#pragma GCC unroll 16
    for (int p = 0; p < CHUNK / 2; p++) source.pair(chunk * (CHUNK / 2) + p, made[p]);
}

#if MOEDGE_LEVEL == 1
__attribute__((always_inline)) inline void make_chunk(const Codes<Type::BF16>& source, int64_t chunk, Pair (&made)[CHUNK / 2]) {
    const uint8_t* from = source.at + chunk * 2 * CHUNK;
    for (int v = 0; v < VECTORS; v++, from += W * source.row_nbytes) {
        for (int r = 0; r < W; r++) _mm_prefetch((const char*)from + r * source.row_nbytes + source.ahead, _MM_HINT_T0);
        for (int half = 0; half < 2; half++) {
            vi both[W];
            Codes<Type::BF16>::turn(from + CHUNK * half, source.row_nbytes, both);
#pragma GCC unroll 8
            for (int p = 0; p < W; p++) {
                made[half * W + p].values[0][v] = (vf)left_by(both[p], 16);
                made[half * W + p].values[1][v] = (vf)(both[p] & all_lanes(int(0xffff0000)));
            }
        }
    }
}
#endif

// Pairs that were widened before, for the rows after the first.
struct Widened {
    static constexpr bool WHOLE = false;
    const Pair* at;

    void prefetch(int64_t) const {}

    void pair(int64_t index, Pair& found) const {
#if MOEDGE_LEVEL >= 3
        found.values[0] = _mm512_load_si512(&at[index].values[0]);
        found.values[1] = _mm512_load_si512(&at[index].values[1]);
#else
        found = at[index];
#endif
    }
};

// The scale and the zero of a group for each output: a weight is value(code) * scale + zero, times its row's factor.
struct Factors {
    vf scale[VECTORS], zero[VECTORS];
};

// A matrix with the bias of its products, whose inputs may be rounded to integers of 8 bits (tiles_integer.h): neither
// levels of NF4 nor floats are such.
struct Matrix : moedge_matrix {
    Type type;
    const uint16_t* bias;
    bool integers;

    explicit Matrix(const moedge_matrix& matrix, const uint16_t* of_products = nullptr, bool rounds = false)
        : moedge_matrix(matrix), type(matrix.codes_type), bias(of_products), integers(rounds && type != Type::NF4 && type != Type::BF16) {}

    int64_t tiles() const { return rows / OUTPUTS; }

    // All scales of a tile are adjacent: those of its first group, of its second, and so on.
    int64_t first_scale(int64_t tile, int64_t at) const { return (tile * (columns / group) + at) * OUTPUTS; }

    // Requests what `finish` reads once the tile is multiplied.
    void prefetch_factors(int64_t tile) const {
        if (factors == nullptr) return;
        for (int i = 0; i < OUTPUTS; i += 16) _mm_prefetch((const char*)(factors + tile * OUTPUTS + i), _MM_HINT_T0);
    }

    // Of group `at` of a tile: scales and zeros as two integers of 16 bits in a lane, and the scales.
    void pairs_of(int64_t tile, int64_t at, vi (&pairs)[VECTORS], Factors& found) const {
        for (int v = 0; v < VECTORS; v++) {
            pairs[v] = pairs_of_words(scales + 2 * (first_scale(tile, at) + v * W));
            found.scale[v] = to_floats(pairs[v] & all_lanes(255));
        }
    }

    // Of group `at` of a tile. SCALES is the matrix's scales_type; ANY, with or without zero points, is slower.
    template <Scales SCALES>
    void factors_of(int64_t tile, int64_t at, Factors& found) const {
        const int64_t item = first_scale(tile, at);
        if (SCALES == Scales::PAIRS) {
            vi pairs[VECTORS];
            pairs_of(tile, at, pairs, found);
            for (int v = 0; v < VECTORS; v++)
                found.zero[v] = mul(fma(to_floats(right_by(pairs[v], 16)), set1(-1 / 16.0f), set1(8)), found.scale[v]);
            return;
        }
        for (int v = 0; v < VECTORS; v++) {
            const int64_t first = item + v * W;
            if (SCALES == ONES) {
                found.scale[v] = set1(1.0f);
            } else if (SCALES == Scales::BFLOAT16) {
                found.scale[v] = from_bf16((const uint16_t*)scales + first);
            } else if (SCALES == Scales::UINT8) {
                found.scale[v] = powers_of_two(scales + first);
            } else {
                any_factors(first, found.scale[v], found.zero[v]);
            }
        }
    }

    void any_factors(int64_t first, vf& scale, vf& zero) const {
        if (scales_type == Scales::BFLOAT16) scale = from_bf16((const uint16_t*)scales + first);
        if (scales_type == Scales::FLOAT16) scale = from_half((const uint16_t*)scales + first);
        if (scales_type == Scales::FLOAT32) scale = load((const float*)scales + first);
        if (zeros != nullptr) zero = mul(sub(set1(8), small_integers(zeros + first)), scale);
    }
};

// Rows of x in the order in which products read them: [columns / CHUNK, rows, CHUNK], and the sum of each chunk
// [columns / CHUNK, rows].
struct Inputs {
    const uint16_t* x;
    const float* sums;
    int64_t rows;
};

// Adds the products of COUNT rows from `first` with the columns of the chunks `begin` to `end`, whole parts of groups, to
// `results` [rows, OUTPUTS]. `source` begins with the first chunk. Results stay in registers where there are enough.
template <Scales SCALES, int COUNT, class Source>
void add_rows(float* results, const Source& source, const Matrix& matrix, int64_t tile, const Inputs& in, int64_t first,
              int64_t begin, int64_t end) {
    constexpr bool KEPT = COUNT <= ROWS_AT_ONCE;
    constexpr int KEPT_ROWS = KEPT ? COUNT : 1;
    const bool has_zeros = SCALES == Scales::PAIRS || (SCALES == ANY && matrix.zeros != nullptr);
    const int64_t of_group = matrix.group / CHUNK;
    int64_t group = begin / of_group, left = of_group - begin % of_group;
    results += first * OUTPUTS;
    vf kept[KEPT_ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < KEPT_ROWS; r++)
        for (int v = 0; v < VECTORS; v++) kept[r][v] = load(results + r * OUTPUTS + v * W);
    for (int64_t at = begin, chunks; at < end; at += chunks) {
        chunks = left < MOST_PART / CHUNK ? left : MOST_PART / CHUNK;
        vf sums[COUNT][VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] = set1(0.0f);
        for (int64_t c = 0; c < chunks; c++) {
            const uint16_t* x = in.x + ((at + c) * in.rows + first) * CHUNK;
            const int64_t from = (at - begin + c) * (CHUNK / 2);
            Pair made[CHUNK / 2];
            if constexpr (Source::WHOLE) make_chunk(source, at - begin + c, made);
            for (int p = 0; p < CHUNK / 2; p++) {
                Pair pair;
                source.prefetch(from + p);
                if constexpr (Source::WHOLE) pair = made[p];
                else source.pair(from + p, pair);
#pragma GCC unroll 16
                for (int r = 0; r < COUNT; r++) add_products(sums[r], pair, x + r * CHUNK + 2 * p);
            }
        }
        Factors factors;
        matrix.factors_of<SCALES>(tile, group, factors);
        if ((left -= chunks) == 0) group++, left = of_group;
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) {
            float total = 0;
            if (has_zeros) {
                const float* totals = in.sums + at * in.rows + first + r;
                total = totals[0];
                for (int64_t c = 1; c < chunks; c++) total += totals[c * in.rows];
            }
            for (int v = 0; v < VECTORS; v++) {
                vf result = KEPT ? kept[r % KEPT_ROWS][v] : load(results + r * OUTPUTS + v * W);
                result = fma(factors.scale[v], sums[r][v], result);
                if (has_zeros) result = fma(factors.zero[v], set1(total), result);
                if (KEPT) kept[r % KEPT_ROWS][v] = result;
                else store(results + r * OUTPUTS + v * W, result);
            }
        }
    }
    if (!KEPT) return;
#pragma GCC unroll 16
    for (int r = 0; r < KEPT_ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(results + r * OUTPUTS + v * W, kept[r][v]);
}

template <Scales SCALES, class Source>
void add_rows(int64_t rows, float* results, const Source& source, const Matrix& matrix, int64_t tile, const Inputs& in,
              int64_t first, int64_t begin, int64_t end) {
#define MOEDGE_CASE(n) \
    case n:            \
        return add_rows<SCALES, n>(results, source, matrix, tile, in, first, begin, end);
    switch (rows) {
        MOEDGE_CASE(1) MOEDGE_CASE(2) MOEDGE_CASE(3)
#if MOEDGE_LEVEL >= 2
        MOEDGE_CASE(4) MOEDGE_CASE(5) MOEDGE_CASE(6)
#endif
#if MOEDGE_LEVEL >= 3
        MOEDGE_CASE(7) MOEDGE_CASE(8) MOEDGE_CASE(9) MOEDGE_CASE(10) MOEDGE_CASE(11) MOEDGE_CASE(12)
#endif
    }
#undef MOEDGE_CASE
}

// Multiplies results by the factors of their rows of the matrix, and adds its bias.
void finish(const Matrix& matrix, int64_t tile, int64_t rows, float* results) {
    if (matrix.factors != nullptr)
        for (int64_t r = 0; r < rows; r++)
            for (int i = 0; i < OUTPUTS; i++) results[r * OUTPUTS + i] *= matrix.factors[tile * OUTPUTS + i];
    if (matrix.bias == nullptr) return;
    const uint16_t* bias = matrix.bias + tile * OUTPUTS;
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < OUTPUTS; i++) results[r * OUTPUTS + i] += bf16_to_float(bias[i]);
}

template <Type VALUES>
inline Codes<VALUES> codes_of(const uint8_t* codes, int64_t tile, int64_t columns) {
    const uint8_t* from = codes + tile * (columns / 2) * Codes<VALUES>::NBYTES;
#if MOEDGE_LEVEL == 1
    if constexpr (VALUES == Type::BF16) return Codes<VALUES>(from, columns);
    else return Codes<VALUES>(from);
#else
    return Codes<VALUES>(from);
#endif
}

template <Type VALUES, Scales SCALES>
inline void multiply_tile(const Matrix& matrix, int64_t tile, const Inputs& in, float* results) {
    memset(results, 0, static_cast<size_t>(in.rows) * OUTPUTS * sizeof(float));
    matrix.prefetch_factors(tile);
    const int64_t chunks = matrix.columns / CHUNK;
    const Codes<VALUES> source = codes_of<VALUES>(matrix.codes, tile, matrix.columns);
    if (in.rows <= MOST_DIRECT) {
        const int64_t at_once = in.rows <= ROWS_DIRECT ? in.rows : (in.rows + 1) / 2;
        for (int64_t first = 0; first < in.rows; first += at_once) {
            const int64_t rest = in.rows - first;
            add_rows<SCALES>(rest < at_once ? rest : at_once, results, source, matrix, tile, in, first, 0, chunks);
        }
    } else {
        constexpr int64_t SEVERAL = MOST_WIDENED / CHUNK;
        Pair widened[MOST_WIDENED / 2];
        const int64_t blocks = (in.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, at_once = (in.rows + blocks - 1) / blocks;
        for (int64_t begin = 0; begin < chunks; begin += SEVERAL) {
            const int64_t end = begin + SEVERAL < chunks ? begin + SEVERAL : chunks, pairs = (end - begin) * (CHUNK / 2);
            if constexpr (Codes<VALUES>::WHOLE)
                for (int64_t c = begin; c < end; c++) {
                    for (int64_t p = 0; p < CHUNK / 2; p++) source.prefetch(c * (CHUNK / 2) + p);
                    make_chunk(source, c, (Pair(&)[CHUNK / 2])widened[(c - begin) * (CHUNK / 2)]);
                }
            else
                for (int64_t p = 0; p < pairs; p++) {
                    source.prefetch(begin * (CHUNK / 2) + p);
                    source.pair(begin * (CHUNK / 2) + p, widened[p]);
                }
            for (int64_t first = 0; first < in.rows; first += at_once) {
                const int64_t rest = in.rows - first;
                add_rows<SCALES>(rest < at_once ? rest : at_once, results, Widened{widened}, matrix, tile, in, first, begin, end);
            }
        }
    }
    finish(matrix, tile, in.rows, results);
}

// Writes the products of all rows (MOST_ROWS at most) with one tile into `results` [rows, OUTPUTS].
inline void multiply_tile(const Matrix& matrix, int64_t tile, const Inputs& in, float* results) {
    const Scales scales = matrix.scales_type;
    switch (matrix.type) {
        case Type::NF4:
            if (scales == Scales::BFLOAT16) return multiply_tile<Type::NF4, Scales::BFLOAT16>(matrix, tile, in, results);
            return multiply_tile<Type::NF4, ANY>(matrix, tile, in, results);
#if MOEDGE_LEVEL == 1
        case Type::BF16: return multiply_tile<Type::BF16, ONES>(matrix, tile, in, results);
#else
        case Type::INT4:
            if (scales == Scales::PAIRS) return multiply_tile<Type::INT4, Scales::PAIRS>(matrix, tile, in, results);
            return multiply_tile<Type::INT4, ANY>(matrix, tile, in, results);
        case Type::E2M1: return multiply_tile<Type::E2M1, Scales::UINT8>(matrix, tile, in, results);
        case Type::INT3: return multiply_tile<Type::INT3, Scales::BFLOAT16>(matrix, tile, in, results);
        case Type::VQ2: return multiply_tile<Type::VQ2, Scales::BFLOAT16>(matrix, tile, in, results);
        case Type::INT8: return multiply_tile<Type::INT8, ANY>(matrix, tile, in, results);
#endif
        default: break;
    }
}

// The sum of a chunk, in one order.
inline float sum_of(const uint16_t* chunk) {
    float total[8] = {0};
    for (int i = 0; i < CHUNK; i += 8)
        for (int j = 0; j < 8; j++) total[j] += bf16_to_float(chunk[i + j]);
    return ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]));
}

inline void round_all(const float* from, uint16_t* to) {
    for (int v = 0; v < VECTORS; v++) to_bf16(load(from + v * W), to + v * W);
}

}  // namespace

#endif
