// Products with matrices in order `tiles` whose inputs are rounded to integers of 8 bits, with a scale for each chunk of a
// row: codes are multiplied as they are, four columns at a time, and sums of a chunk are exact.
//
// A weight is (code - OFFSET) * unit * scale + zero, where `unit` is 1/2 for E2M1 and 1 otherwise; with PAIRS it is
// (16 code - zero) * scale / 16. With q and s the integers and the scale of a chunk of the input, a result is, in float32 and
// in this order whatever the other rows, tiles and threads are, one of
//
//     sum over chunks of (scale * unit * s * (sum of (code - OFFSET) * q) + zero * s * (sum of q)),
//     sum over chunks of scale * s / 16 * (sum of 16 code * q - zero * (sum of q)).
#ifndef MOEDGE_TILES_INTEGER_H
#define MOEDGE_TILES_INTEGER_H

#include "tiles.h"

namespace {

// Whether codes of eight bits have their sign: without VNNI, products of their absolute values are the faster ones.
constexpr bool SIGNED = MOEDGE_LEVEL < 3;

// Codes of four bits are multiplied as so many times themselves: sums that zeros are subtracted from are, and with VNNI they
// can be from the start.
constexpr int32_t INT4_FACTOR = MOEDGE_LEVEL >= 3 ? 16 : 1;

// What has to be subtracted from codes; of E2M1 and VQ2 twice that, or from what is twice the codes.
constexpr int32_t offset_of(Type type) {
    if (type == Type::INT8) return SIGNED ? 0 : 128;
    return type == Type::E2M1 ? 12 : type == Type::INT3 ? 4 : type == Type::VQ2 ? 15 : 8 * INT4_FACTOR;
}

// Codes are multiplied as so many times their values.
constexpr float multiple_of(Type type) {
    return type == Type::E2M1 || type == Type::VQ2 ? 2 : type == Type::INT4 ? INT4_FACTOR : 1;
}

// Sums of products of four codes and four integers of every lane: of 32 bits with VNNI, else two of 16 bits, in which these
// many products fit; a code is at most 15, of E2M1 24, and an integer at most 127.
constexpr int summed_at_once(Type type) {
    return MOEDGE_LEVEL >= 3 ? CHUNK / 4 : type == Type::INT8 ? 1 : type == Type::E2M1 ? 4 : CHUNK / 4;
}

#if MOEDGE_LEVEL >= 3
template <Type VALUES>
inline vi add_products(vi sums, vi codes, vi integers) {
    // GCC would copy a sum before and after it is added to, and spill what then does not fit the registers.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(integers));
    return sums;
}
template <int FACTOR>
inline vi begun(vi total) { return FACTOR == 1 ? total : all_lanes(0); }
// `total` and FACTOR times what was added since it was `begun`.
template <int FACTOR>
inline vi ended(vi total, vi sums) {
    // GCC would take sums of more than five rows for those that they begin with, and keep them in memory.
    asm("" : "+v"(sums));
    return FACTOR == 1 ? sums : add_lanes(total, left_by(sums, FACTOR == 2 ? 1 : 4));
}
#else
template <Type VALUES>
inline vi add_products(vi sums, vi codes, vi integers) {
    if (VALUES == Type::INT8) return pairs_of_products(absolute(codes), with_signs(integers, codes));
    // GCC would sum products in another order, and keep each sum twice, which does not fit the registers.
    asm("vpaddw %1, %0, %0" : "+v"(sums) : "v"(pairs_of_products(codes, integers)));
    return sums;
}
template <int>
inline vi begun(vi) { return all_lanes(0); }
template <int FACTOR>
inline vi ended(vi total, vi sums) {
    return add_lanes(total, sums_of_pairs(sums, all_words(FACTOR)));
}
#endif

// Adds to each lane of `sum` the products of its two integers of 16 bits and two others.
inline vi add_pairs(vi sum, vi words, vi factors) {
#if MOEDGE_LEVEL >= 3
    return _mm512_dpwssd_epi32(sum, words, factors);
#else
    return add_lanes(sum, sums_of_pairs(words, factors));
#endif
}

// Bytes of codes that are requested before they are multiplied, into the second cache: requests for the first one cost a
// Zen 4 a seventh of the time with one row (bench/results/log.md, "A pass of one sequence").
constexpr int64_t INTEGERS_AHEAD = 8192;

// Four columns of a tile's codes: a lane of 32 bits has those of one output.
struct Quad {
    vi values[VECTORS];
};

// Quads from codes, whose order Codes in tiles.h describes.
template <Type VALUES>
struct Quads {
    static constexpr int64_t NBYTES = 2 * FloatCodes<VALUES>::NBYTES;
    static constexpr bool WHOLE = FloatCodes<VALUES>::WHOLE;
    const uint8_t* at;
    vi table;

    explicit Quads(const uint8_t* from) : at(from) {
        // Twice the numbers of TABLES, above their least.
        static const uint8_t entries[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        table = table_of(entries);
    }

    void prefetch(int64_t index) const {
        const char* from = (const char*)at + index * NBYTES + INTEGERS_AHEAD;
        for (int64_t line = 0; line < NBYTES; line += 64) _mm_prefetch(from + line, _MM_HINT_T1);
    }

    __attribute__((always_inline)) void columns_of_chunk(int64_t index, Quad& out) const {
        for (int v = 0; v < VECTORS; v++) out.values[v] = four_columns<VALUES>(at, uint64_t(index), v);
    }

    vi numbers(vi codes) const { return VALUES == Type::E2M1 ? looked_up(table, codes) : codes; }

    // Lanes of two bytes of the first and two of the second pair of columns, W outputs in each result.
#if MOEDGE_LEVEL >= 2
    static vi words_of_both() {
        alignas(64) uint16_t order[32];
        for (int i = 0; i < 32; i++) order[i] = uint16_t(i / 2 + i % 2 * 16);
        return _mm512_load_si512(order);
    }

    __attribute__((always_inline)) void quad(int64_t index, Quad& out) const {
        if (WHOLE) return columns_of_chunk(index, out);
        const uint8_t* from = at + index * NBYTES;
        if (VALUES == Type::INT8) {
            for (int v = 0; v < 2; v++) {
                const __m256i first = _mm256_loadu_si256((const __m256i*)(from + 32 * v));
                const __m256i second = _mm256_loadu_si256((const __m256i*)(from + 64 + 32 * v));
                const vi both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
                out.values[v] = _mm512_xor_si512(_mm512_permutexvar_epi16(words_of_both(), both), all_bytes(SIGNED ? 0 : -128));
            }
            return;
        }
        const vi both = _mm512_permutexvar_epi16(words_of_both(), load_bytes(from));
        if (VALUES == Type::INT4 && INT4_FACTOR == 16) {
            out.values[0] = left_by(both, 4) & all_bytes(-16);
            out.values[1] = both & all_bytes(-16);
            return;
        }
        out.values[0] = numbers(mask(both, all_bytes(15)));
        out.values[1] = numbers(high_nibbles(both));
    }
#else
    static void interleave(const uint8_t* first, const uint8_t* second, vi& low, vi& high) {
        const vi a = load_bytes(first), b = load_bytes(second);
        const vi x = _mm256_unpacklo_epi16(a, b), y = _mm256_unpackhi_epi16(a, b);
        low = _mm256_permute2x128_si256(x, y, 0x20);
        high = _mm256_permute2x128_si256(x, y, 0x31);
    }

    __attribute__((always_inline)) void quad(int64_t index, Quad& out) const {
        if (WHOLE) return columns_of_chunk(index, out);
        const uint8_t* from = at + index * NBYTES;
        if (VALUES == Type::INT8) {
            for (int half = 0; half < 2; half++)
                interleave(from + 32 * half, from + 64 + 32 * half, out.values[2 * half], out.values[2 * half + 1]);
            return;
        }
        vi both[2];
        interleave(from, from + OUTPUTS, both[0], both[1]);
        for (int v = 0; v < 2; v++) {
            out.values[v] = numbers(mask(both[v], all_bytes(15)));
            out.values[2 + v] = numbers(high_nibbles(both[v]));
        }
    }
#endif
};

// All quads of a chunk, inline: GCC would call what makes each, with shifts that are variables.
template <class Source>
__attribute__((always_inline)) inline void make_chunk(const Source& source, int64_t chunk, Quad (&made)[CHUNK / 4]) {
#pragma GCC unroll 8
    for (int q = 0; q < CHUNK / 4; q++) source.quad(chunk * (CHUNK / 4) + q, made[q]);
}

// Quads that were made before, for the rows after the first.
struct MadeQuads {
    static constexpr bool WHOLE = false;
    const Quad* at;

    void prefetch(int64_t) const {}
    void quad(int64_t index, Quad& found) const { found = at[index]; }
};

// Rows of x as integers, [columns / CHUNK, rows, CHUNK], and of each chunk [columns / CHUNK, rows] its scale times `unit`,
// its sum times its scale, and what the offsets of codes add to its integer sums; with PAIRS, what zeros are multiplied by.
struct IntegerInputs {
    int8_t* x;
    float *scales, *sums;
    int32_t* starts;
    int64_t rows;

    IntegerInputs(char* scratch, int64_t num_rows, int64_t columns)
        : x((int8_t*)scratch), scales((float*)(x + num_rows * columns)), sums(scales + num_rows * (columns / CHUNK)),
          starts((int32_t*)(sums + num_rows * (columns / CHUNK))), rows(num_rows) {}

    // Rounds a chunk of a row, for products with a matrix. Results with a number that is not finite are NaN.
    void put(const vf (&numbers)[VECTORS], int64_t chunk, int64_t row, const Matrix& matrix) const {
        vf most = set1(0.0f);
        bool finite = true;
        for (int v = 0; v < VECTORS; v++) {
            most = max(abs(numbers[v]), most);
            finite &= all_finite(numbers[v]);
        }
        const float peak = largest(most);
        const vf inverse = set1(peak > 1e-30f && finite ? 127 / peak : 0.0f);
        const int64_t at = chunk * rows + row;
        vi added = all_lanes(0);
        for (int v = 0; v < VECTORS; v++) {
            const vi rounded = to_integers(mul(numbers[v], inverse));
            to_bytes(rounded, x + at * CHUNK + v * W);
            added = add_lanes(added, rounded);
        }
        // At most 127 * CHUNK, which floats are exact for.
        const int32_t total = int32_t(sum(to_floats(added)));
        const float scale = finite ? peak / 127 : __builtin_nanf("");
        const bool pairs = matrix.scales_type == Scales::PAIRS;
        scales[at] = scale / (pairs ? 16 : multiple_of(matrix.type));
        sums[at] = scale * float(total);
        starts[at] = pairs ? -total * 65536 : -offset_of(matrix.type) * total;
    }

    void put(const uint16_t* from, int64_t chunk, int64_t row, const Matrix& matrix) const {
        vf numbers[VECTORS];
        for (int v = 0; v < VECTORS; v++) numbers[v] = from_bf16(from + v * W);
        put(numbers, chunk, row, matrix);
    }
};

// Rows of a block, whose sums and results fit the registers: without AVX-512, sums of integers need one for each product,
// too. Up to so many rows codes are unpacked again for each block; of more, keeping quads is faster.
constexpr int INTEGERS_DIRECT = MOEDGE_LEVEL >= 2 ? 6 : 2, INTEGERS_AT_ONCE = MOEDGE_LEVEL >= 2 ? 6 : 4;
// So few rows are one block, though results are then kept in memory: a second block would unpack codes once more. Codes that
// are made a chunk at once leave no registers for it.
template <Type VALUES>
constexpr int INTEGERS_ONE_BLOCK = MOEDGE_LEVEL >= 3 && !FloatCodes<VALUES>::WHOLE ? 8 : INTEGERS_DIRECT;
constexpr int integers_most_direct(Type type) { return MOEDGE_LEVEL < 2 ? 2 : type == Type::INT4 ? 24 : 12; }

// Vectors of a tile whose sums with so many rows fit the registers.
constexpr int vectors_at_once(int rows) { return MOEDGE_LEVEL >= 2 || rows <= INTEGERS_DIRECT ? VECTORS : VECTORS / 2; }

// Adds the products of COUNT rows from `first` with the columns of the chunks `begin` to `end` to `results`
// [rows, OUTPUTS], in the vectors of outputs from `V`. `source` begins with the first chunk. Results stay in registers
// where there are enough.
template <Type VALUES, Scales SCALES, int COUNT, int V, class Source>
void add_integer_rows(float* results, const Source& source, const Matrix& matrix, int64_t tile, const IntegerInputs& in,
                      int64_t first, int64_t begin, int64_t end) {
    constexpr int END = V + vectors_at_once(COUNT);
    constexpr bool KEPT = COUNT <= INTEGERS_AT_ONCE;
    constexpr int KEPT_ROWS = KEPT ? COUNT : 1;
    constexpr bool PAIRS = SCALES == Scales::PAIRS;
    constexpr int FACTOR = PAIRS ? 16 / INT4_FACTOR : VALUES == Type::VQ2 ? 2 : 1;
    constexpr int AT_ONCE = summed_at_once(VALUES);
    const bool has_zeros = SCALES == ANY && matrix.zeros != nullptr;
    const int64_t chunks = matrix.group / CHUNK;
    int64_t group = begin / chunks, part = begin % chunks;
    results += first * OUTPUTS;
    vf kept[KEPT_ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < KEPT_ROWS; r++)
        for (int v = V; v < END; v++) kept[r][v] = load(results + r * OUTPUTS + v * W);
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t at = chunk * in.rows + first;
        vi sums[COUNT][VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++)
            for (int v = V; v < END; v++) sums[r][v] = all_lanes(PAIRS ? 0 : in.starts[at + r]);
        const int8_t* x = in.x + at * CHUNK;
        Quad made[CHUNK / 4];
        if (Source::WHOLE) make_chunk(source, chunk - begin, made);
        for (int begin_q = 0; begin_q < CHUNK / 4; begin_q += AT_ONCE) {
            vi partial[COUNT][VECTORS];
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; r++)
                for (int v = V; v < END; v++) partial[r][v] = begun<FACTOR>(sums[r][v]);
            for (int q = begin_q; q < begin_q + AT_ONCE; q++) {
                Quad quad;
                source.prefetch((chunk - begin) * (CHUNK / 4) + q);
                if (Source::WHOLE) quad = made[q];
                else source.quad((chunk - begin) * (CHUNK / 4) + q, quad);
#pragma GCC unroll 16
                for (int r = 0; r < COUNT; r++) {
                    int32_t four;
                    memcpy(&four, x + r * CHUNK + 4 * q, 4);
                    const vi integers = all_lanes(four);
                    for (int v = V; v < END; v++)
                        partial[r][v] = add_products<VALUES>(partial[r][v], quad.values[v], integers);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; r++)
                for (int v = V; v < END; v++) sums[r][v] = ended<FACTOR>(sums[r][v], partial[r][v]);
        }
        Factors factors;
        vi pairs[VECTORS];
        if (PAIRS) matrix.pairs_of(tile, group, pairs, factors);
        else matrix.factors_of<SCALES>(tile, group, factors);
        if (++part == chunks) group++, part = 0;
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) {
            const vf scale = set1(in.scales[at + r]), total = set1(in.sums[at + r]);
            for (int v = V; v < END; v++) {
                vf result = KEPT ? kept[r % KEPT_ROWS][v] : load(results + r * OUTPUTS + v * W);
                if (PAIRS) sums[r][v] = add_pairs(sums[r][v], pairs[v], all_lanes(in.starts[at + r]));
                result = fma(mul(factors.scale[v], scale), to_floats(sums[r][v]), result);
                if (has_zeros) result = fma(factors.zero[v], total, result);
                if (KEPT) kept[r % KEPT_ROWS][v] = result;
                else store(results + r * OUTPUTS + v * W, result);
            }
        }
    }
    if (!KEPT) return;
#pragma GCC unroll 16
    for (int r = 0; r < KEPT_ROWS; r++)
        for (int v = V; v < END; v++) store(results + r * OUTPUTS + v * W, kept[r][v]);
}

template <Type VALUES, Scales SCALES, int COUNT, class Source>
void add_integer_rows(float* results, const Source& source, const Matrix& matrix, int64_t tile, const IntegerInputs& in,
                      int64_t first, int64_t begin, int64_t end) {
    add_integer_rows<VALUES, SCALES, COUNT, 0>(results, source, matrix, tile, in, first, begin, end);
    if constexpr (vectors_at_once(COUNT) < VECTORS)
        add_integer_rows<VALUES, SCALES, COUNT, VECTORS / 2>(results, source, matrix, tile, in, first, begin, end);
}

template <Type VALUES, Scales SCALES, class Source>
void add_integer_rows(int64_t rows, float* results, const Source& source, const Matrix& matrix, int64_t tile,
                      const IntegerInputs& in, int64_t first, int64_t begin, int64_t end) {
#define MOEDGE_CASE(n) \
    case n:            \
        return add_integer_rows<VALUES, SCALES, n>(results, source, matrix, tile, in, first, begin, end);
    switch (rows) {
        MOEDGE_CASE(1) MOEDGE_CASE(2) MOEDGE_CASE(3) MOEDGE_CASE(4)
#if MOEDGE_LEVEL >= 2
        MOEDGE_CASE(5) MOEDGE_CASE(6)
#endif
#if MOEDGE_LEVEL >= 3
        MOEDGE_CASE(7) MOEDGE_CASE(8)
#endif
    }
#undef MOEDGE_CASE
}

template <Type VALUES, Scales SCALES>
void multiply_integers(const Matrix& matrix, int64_t tile, const IntegerInputs& in, float* results) {
    memset(results, 0, static_cast<size_t>(in.rows) * OUTPUTS * sizeof(float));
    matrix.prefetch_factors(tile);
    const int64_t chunks = matrix.columns / CHUNK;
    const Quads<VALUES> source(matrix.codes + tile * (matrix.columns / 4) * Quads<VALUES>::NBYTES);
    if (in.rows <= integers_most_direct(VALUES)) {
        const int64_t blocks = in.rows <= INTEGERS_ONE_BLOCK<VALUES> ? 1 : (in.rows + INTEGERS_DIRECT - 1) / INTEGERS_DIRECT;
        const int64_t at_once = (in.rows + blocks - 1) / blocks;
        for (int64_t first = 0; first < in.rows; first += at_once) {
            const int64_t rest = in.rows - first;
            add_integer_rows<VALUES, SCALES>(rest < at_once ? rest : at_once, results, source, matrix, tile, in, first, 0, chunks);
        }
    } else {
        constexpr int64_t SEVERAL = MOST_WIDENED / CHUNK;
        Quad made[MOST_WIDENED / 4];
        const int64_t blocks = (in.rows + INTEGERS_AT_ONCE - 1) / INTEGERS_AT_ONCE, at_once = (in.rows + blocks - 1) / blocks;
        for (int64_t begin = 0; begin < chunks; begin += SEVERAL) {
            const int64_t end = begin + SEVERAL < chunks ? begin + SEVERAL : chunks, quads = (end - begin) * (CHUNK / 4);
            if (Quads<VALUES>::WHOLE)
                for (int64_t c = begin; c < end; c++) {
                    for (int64_t q = 0; q < CHUNK / 4; q++) source.prefetch(c * (CHUNK / 4) + q);
                    make_chunk(source, c, (Quad(&)[CHUNK / 4])made[(c - begin) * (CHUNK / 4)]);
                }
            else
                for (int64_t q = 0; q < quads; q++) {
                    source.prefetch(begin * (CHUNK / 4) + q);
                    source.quad(begin * (CHUNK / 4) + q, made[q]);
                }
            for (int64_t first = 0; first < in.rows; first += at_once) {
                const int64_t rest = in.rows - first;
                add_integer_rows<VALUES, SCALES>(rest < at_once ? rest : at_once, results, MadeQuads{made}, matrix, tile, in,
                                               first, begin, end);
            }
        }
    }
    finish(matrix, tile, in.rows, results);
}

// Writes the products of all rows (MOST_ROWS at most) with one tile into `results` [rows, OUTPUTS].
void multiply_integers(const Matrix& matrix, int64_t tile, const IntegerInputs& in, float* results) {
    switch (matrix.type) {
        case Type::INT4:
            if (matrix.scales_type == Scales::PAIRS) return multiply_integers<Type::INT4, Scales::PAIRS>(matrix, tile, in, results);
            return multiply_integers<Type::INT4, ANY>(matrix, tile, in, results);
        case Type::E2M1: return multiply_integers<Type::E2M1, Scales::UINT8>(matrix, tile, in, results);
        case Type::INT3: return multiply_integers<Type::INT3, Scales::BFLOAT16>(matrix, tile, in, results);
        case Type::VQ2: return multiply_integers<Type::VQ2, Scales::BFLOAT16>(matrix, tile, in, results);
        default: return multiply_integers<Type::INT8, ANY>(matrix, tile, in, results);
    }
}

}  // namespace

#endif
