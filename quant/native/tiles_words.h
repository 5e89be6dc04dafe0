// Products with matrices in order `tiles` whose codes are integers, with AVX2 alone: a multiplication of integers of 16 bits
// there adds twice as many products as one of floats. An input becomes an integer of 16 bits times a power of two that its
// chunk shares, which keeps all bits of bfloat16 down to a 128th of the largest, and of smaller ones what is more than a
// 65536th of it.
//
// A weight is (code - OFFSET) * unit * scale + zero, where `unit` is 1/2 for E2M1 and VQ2, and 1 otherwise. With q the
// integers and s the power of two of a chunk, a result is, in float32 and in this order whatever the other rows, tiles and
// threads are,
//
//     sum over chunks of (scale * (unit * s) * (sum of (code - OFFSET) * q) + zero * (s * (sum of q))).
//
// Sums of q and of products are exact: the latter are at most 32 * 127 * 32767. A chunk with a number that is not finite
// gives NaN.
#ifndef MOEDGE_TILES_WORDS_H
#define MOEDGE_TILES_WORDS_H

#include "tiles_integer.h"

namespace {

#if MOEDGE_LEVEL == 1

inline bool multiplies_words(const Matrix& matrix) { return matrix.type != Type::NF4 && matrix.type != Type::BF16; }

constexpr float unit_of(Type type) { return type == Type::E2M1 || type == Type::VQ2 ? 0.5f : 1; }

// What is kept of a chunk beside its integers: the exponent of their power of two, as floats have it, and their sum, which
// takes 21 bits.
struct ChunkOfWords {
    uint32_t bits;

    static ChunkOfWords of(uint32_t exponent, int32_t sum) { return {exponent << 24 | (uint32_t(sum) & 0xffffff)}; }
    // Infinite where a number was not finite: the integers are 0 there, and 0 times infinity is NaN.
    float power() const {
        const uint32_t exponent = bits >> 24 << 23;
        float value;
        memcpy(&value, &exponent, 4);
        return value;
    }
    int32_t sum() const { return int32_t(bits << 8) >> 8; }
};
static_assert(sizeof(ChunkOfWords) == sizeof(float), "kept where the sums of other inputs are");

inline int32_t largest_lane(vi x) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

inline int32_t sum_of_lanes(vi x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// Makes integers of a chunk of bfloat16 for products with a matrix.
inline ChunkOfWords words_of_chunk(const uint16_t* from, const Matrix& matrix, int16_t* words) {
    const bool crossed = matrix.type == Type::INT3 || matrix.type == Type::VQ2;
    vf numbers[VECTORS];
    vi most = all_lanes(0);
    for (int v = 0; v < VECTORS; v++) {
        numbers[v] = from_bf16(from + v * W);
        most = _mm256_max_epi32(most, (vi)abs(numbers[v]));
    }
    // The largest number becomes one of 2^14 to 2^15, if that is a normal power of two.
    const uint32_t exponent = uint32_t(largest_lane(most)) >> 23, of_one = exponent > 15 ? exponent - 14 : 1;
    if (exponent == 255) {
        memset(words, 0, CHUNK * sizeof(int16_t));
        return ChunkOfWords::of(255, 0);
    }
    const vf inverse = (vf)all_lanes(int(254 - of_one) << 23);
    vi total = all_lanes(0);
    for (int half = 0; half < 2; half++) {
        const vi first = to_integers(mul(numbers[2 * half], inverse)), second = to_integers(mul(numbers[2 * half + 1], inverse));
        vi both = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
        total = add_lanes(total, sums_of_pairs(both, all_words(1)));
        if (crossed) both = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(both, 0xd8), 0xd8);
        store_bytes(words + 16 * half, both);
    }
    return ChunkOfWords::of(of_one, sum_of_lanes(total));
}

// Two columns of a tile's codes: a lane has those of one output, in 16 bits each.
struct WordPair {
    vi values[VECTORS];
};

// Pairs from codes, whose order FloatCodes describes; of those that are made by chunks, a pair is the first and the third or
// the second and the fourth of four columns.
template <Type VALUES>
struct WordCodes {
    static constexpr int64_t NBYTES = FloatCodes<VALUES>::NBYTES;
    static constexpr bool WHOLE = FloatCodes<VALUES>::WHOLE;
    const uint8_t* at;
    vi table;

    explicit WordCodes(const uint8_t* from) : at(from), table(Quads<VALUES>(from).table) {}

    void prefetch(int64_t index) const { _mm_prefetch((const char*)at + index * NBYTES + AHEAD, _MM_HINT_T0); }

    __attribute__((always_inline)) void pair(int64_t index, WordPair& out) const {
        if (WHOLE) {
            for (int v = 0; v < VECTORS; v++) {
                const vi four = four_columns<VALUES>(at, uint64_t(index) / 2, v);
                const vi two = mask(uint64_t(index) % 2 ? right_by(four, 8) : four, all_lanes(0x00ff00ff));
                out.values[v] = VALUES == Type::VQ2 ? add_words(two, two) : two;
            }
            return;
        }
        const uint8_t* from = at + index * NBYTES;
        if (VALUES == Type::INT8) {
            for (int v = 0; v < VECTORS; v++) out.values[v] = _mm256_cvtepi8_epi16(load_half(from + 16 * v));
            return;
        }
        for (int half = 0; half < 2; half++) {
            const vi both = pairs_of_words(from + 16 * half);
            out.values[half] = numbers(mask(both, all_words(15)));
            out.values[half + 2] = numbers(right_by(both, 4) & all_words(15));
        }
    }

    // The table's entry for 0 would fill the upper bytes.
    vi numbers(vi codes) const { return VALUES == Type::E2M1 ? mask(looked_up(table, codes), all_words(255)) : codes; }
};

template <Type VALUES>
__attribute__((always_inline)) inline void make_chunk(const WordCodes<VALUES>& source, int64_t chunk, WordPair (&made)[CHUNK / 2]) {
#pragma GCC unroll 16
    for (int p = 0; p < CHUNK / 2; p++) source.pair(chunk * (CHUNK / 2) + p, made[p]);
}

struct MadeWords {
    static constexpr bool WHOLE = false;
    const WordPair* at;

    void prefetch(int64_t) const {}
    void pair(int64_t index, WordPair& found) const { found = at[index]; }
};

// Rows of a block of which all outputs' sums, and of which half of them fit the registers.
constexpr int WORDS_DIRECT = 2, WORDS_AT_ONCE = 4;

// Adds the products of COUNT rows from `first` with the columns of the chunks `begin` to `end` to `results`
// [rows, OUTPUTS], in the vectors of outputs from `V`. `source` begins with the first chunk.
template <Type VALUES, Scales SCALES, int COUNT, int V, class Source>
void add_word_rows(float* results, const Source& source, const Matrix& matrix, int64_t tile, const Inputs& in, int64_t first,
                   int64_t begin, int64_t end) {
    constexpr int END = V + (COUNT <= WORDS_DIRECT ? VECTORS : VECTORS / 2);
    const bool has_zeros = SCALES == Scales::PAIRS || (SCALES == ANY && matrix.zeros != nullptr);
    const int64_t chunks = matrix.group / CHUNK;
    int64_t group = begin / chunks, part = begin % chunks;
    results += first * OUTPUTS;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t at = chunk * in.rows + first;
        const ChunkOfWords* told = (const ChunkOfWords*)in.sums + at;
        vi sums[COUNT][VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++)
            for (int v = V; v < END; v++) sums[r][v] = all_lanes(-offset_of(VALUES) * told[r].sum());
        const int16_t* x = (const int16_t*)in.x + at * CHUNK;
        WordPair made[CHUNK / 2];
        if constexpr (Source::WHOLE) make_chunk(source, chunk - begin, made);
        for (int p = 0; p < CHUNK / 2; p++) {
            WordPair pair;
            source.prefetch((chunk - begin) * (CHUNK / 2) + p);
            if constexpr (Source::WHOLE) pair = made[p];
            else source.pair((chunk - begin) * (CHUNK / 2) + p, pair);
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; r++) {
                int32_t two;
                memcpy(&two, x + r * CHUNK + 2 * p, 4);
                const vi integers = all_lanes(two);
                for (int v = V; v < END; v++) sums[r][v] = add_lanes(sums[r][v], sums_of_pairs(pair.values[v], integers));
            }
        }
        Factors factors;
        matrix.factors_of<SCALES>(tile, group, factors);
        if (++part == chunks) group++, part = 0;
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) {
            const float power = told[r].power();
            const vf scale = set1(power * unit_of(VALUES)), total = set1(power * float(told[r].sum()));
            for (int v = V; v < END; v++) {
                float* const to = results + r * OUTPUTS + v * W;
                vf result = fma(mul(factors.scale[v], scale), to_floats(sums[r][v]), load(to));
                if (has_zeros) result = fma(factors.zero[v], total, result);
                store(to, result);
            }
        }
    }
}

template <Type VALUES, Scales SCALES, int COUNT, class Source>
void add_word_rows(float* results, const Source& source, const Matrix& matrix, int64_t tile, const Inputs& in, int64_t first,
                   int64_t begin, int64_t end) {
    add_word_rows<VALUES, SCALES, COUNT, 0>(results, source, matrix, tile, in, first, begin, end);
    if constexpr (COUNT > WORDS_DIRECT)
        add_word_rows<VALUES, SCALES, COUNT, VECTORS / 2>(results, source, matrix, tile, in, first, begin, end);
}

template <Type VALUES, Scales SCALES, class Source>
void add_word_rows(int64_t rows, float* results, const Source& source, const Matrix& matrix, int64_t tile, const Inputs& in,
                   int64_t first, int64_t begin, int64_t end) {
#define MOEDGE_CASE(n) \
    case n:            \
        return add_word_rows<VALUES, SCALES, n>(results, source, matrix, tile, in, first, begin, end);
    switch (rows) { MOEDGE_CASE(1) MOEDGE_CASE(2) MOEDGE_CASE(3) MOEDGE_CASE(4) MOEDGE_CASE(5) }
#undef MOEDGE_CASE
}

template <Type VALUES, Scales SCALES>
void multiply_words(const Matrix& matrix, int64_t tile, const Inputs& in, float* results) {
    memset(results, 0, static_cast<size_t>(in.rows) * OUTPUTS * sizeof(float));
    const int64_t chunks = matrix.columns / CHUNK;
    const WordCodes<VALUES> source(matrix.codes + tile * (matrix.columns / 2) * WordCodes<VALUES>::NBYTES);
    if (in.rows <= WORDS_DIRECT) {
        add_word_rows<VALUES, SCALES>(in.rows, results, source, matrix, tile, in, 0, 0, chunks);
    } else {
        constexpr int64_t SEVERAL = MOST_WIDENED / CHUNK;
        WordPair made[MOST_WIDENED / 2];
        const int64_t blocks = (in.rows + WORDS_AT_ONCE - 1) / WORDS_AT_ONCE, at_once = (in.rows + blocks - 1) / blocks;
        for (int64_t begin = 0; begin < chunks; begin += SEVERAL) {
            const int64_t end = begin + SEVERAL < chunks ? begin + SEVERAL : chunks;
            for (int64_t c = begin; c < end; c++) {
                source.prefetch(c * (CHUNK / 2));
                make_chunk(source, c, (WordPair(&)[CHUNK / 2])made[(c - begin) * (CHUNK / 2)]);
            }
            for (int64_t first = 0; first < in.rows; first += at_once) {
                const int64_t rest = in.rows - first;
                add_word_rows<VALUES, SCALES>(rest < at_once ? rest : at_once, results, MadeWords{made}, matrix, tile, in,
                                              first, begin, end);
            }
        }
    }
    finish(matrix, tile, in.rows, results);
}

// Writes the products of all rows (MOST_ROWS at most) with one tile into `results` [rows, OUTPUTS].
void multiply_words(const Matrix& matrix, int64_t tile, const Inputs& in, float* results) {
    switch (matrix.type) {
        case Type::INT4:
            if (matrix.scales_type == Scales::PAIRS) return multiply_words<Type::INT4, Scales::PAIRS>(matrix, tile, in, results);
            return multiply_words<Type::INT4, ANY>(matrix, tile, in, results);
        case Type::E2M1: return multiply_words<Type::E2M1, Scales::UINT8>(matrix, tile, in, results);
        case Type::INT3: return multiply_words<Type::INT3, Scales::BFLOAT16>(matrix, tile, in, results);
        case Type::VQ2: return multiply_words<Type::VQ2, Scales::BFLOAT16>(matrix, tile, in, results);
        default: return multiply_words<Type::INT8, ANY>(matrix, tile, in, results);
    }
}

#endif

}  // namespace

#endif
