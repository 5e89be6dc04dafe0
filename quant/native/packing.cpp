// Quantizes rows of a bfloat16 matrix into the planes of a packed one. quant/tensor.py calls it.
//
// The bytes are those of the codecs of quant/formats, which define the formats: every operation is the same one in
// float32, or gives the same bits. A thread packs whole blocks of rows, so bytes do not depend on the number of threads.
//
// Codes are first written one a byte, a few columns of a block of rows at a time, and from there to their order.
#include "moedge_cpu.h"
#include "simd.h"

namespace {

// The columns of a block of rows whose codes are in the first cache at a time; a multiple of every group.
constexpr int64_t COLUMNS = 256;
// The rows ahead whose numbers are requested.
constexpr int64_t AHEAD = 2;
// Larger magnitudes of bfloat16, as bits, are infinite or NaN.
constexpr int LARGEST = 0x7f7f;
// A float32 near it has no bits left for a fraction, so adding it rounds to nearest, half to even.
constexpr float ROUNDER = 12582912.0f;

inline vi magnitudes(vi x) { return mask(x, all_words(0x7fff)); }
// Numbers of bfloat16 as integers of 16 bits in the same order.
inline vi in_order(vi x) { return x ^ (SIMD(srai_epi16)(x, 15) & all_words(0x7fff)); }
inline vi greater(vi a, vi b) { return SIMD(max_epi16)(a, b); }
inline vi lesser(vi a, vi b) { return SIMD(min_epi16)(a, b); }

#if MOEDGE_LEVEL >= 2
inline __m256i half_of(vi x, bool upper) { return upper ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x); }
inline __m128i eight_greatest(vi x) {
    const __m256i half = _mm256_max_epi16(half_of(x, false), half_of(x, true));
    return _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
inline __m128i eight_least(vi x) {
    const __m256i half = _mm256_min_epi16(half_of(x, false), half_of(x, true));
    return _mm_min_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Which of at most 15 ascending levels' midpoints are below a number: how many. The nearest midpoint to the number's
// cell, of 31 from -1 to 1 or 32 from 0 to 1, decides, because no cell is as wide as two midpoints are apart.
struct Nearest {
    vf factor, midpoint[2];
    vi index[2];

    // The number of cells in which `most` lies.
    static constexpr float CELLS = 15.4f, UNSIGNED_CELLS = 31.0f;

    Nearest(const float* midpoints, int count, float most, bool is_signed) {
        const float cells = (is_signed ? CELLS : UNSIGNED_CELLS) / most;
        float nearest[32];
        int32_t numbers[32];
        for (int cell = 0; cell < 32; cell++) {
            const float middle = float(is_signed && cell > 15 ? cell - 32 : cell) / cells;
            int best = 0;
            for (int i = 1; i < count; i++)
                if (__builtin_fabsf(midpoints[i] - middle) < __builtin_fabsf(midpoints[best] - middle)) best = i;
            nearest[cell] = midpoints[best];
            numbers[cell] = best;
        }
        factor = set1(cells);
        for (int i = 0; i < 2; i++) {
            midpoint[i] = load(nearest + 16 * i);
            index[i] = _mm512_loadu_si512(numbers + 16 * i);
        }
    }

    vi index_of(vf x) const {
        // The lowest bits are the number of the cell.
        const vi cell = _mm512_castps_si512(fma(x, factor, set1(ROUNDER)));
        const vi found = _mm512_permutex2var_epi32(index[0], cell, index[1]);
        const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_permutex2var_ps(midpoint[0], cell, midpoint[1]), _CMP_GT_OQ);
        return _mm512_mask_add_epi32(found, above, found, _mm512_set1_epi32(1));
    }
};

// 8 is added to codes that are not 0 where the number is negative.
inline vi with_sign(vi codes, vf x) {
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    return _mm512_mask_add_epi32(codes, _mm512_mask_test_epi32_mask(negative, codes, codes), codes, _mm512_set1_epi32(8));
}

// Writes 32 codes, a byte each; `code` gives those of W numbers.
template <class Code>
inline void put_codes(const uint16_t* x, void* to, Code code) {
    for (int i = 0; i < 2; i++)
        _mm_storeu_si128((__m128i*)to + i, _mm512_cvtepi32_epi8(code(from_bf16(x + 16 * i))));
}
#else
inline __m128i eight_greatest(vi x) { return _mm_max_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
inline __m128i eight_least(vi x) { return _mm_min_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }

// How many of at most 15 ascending midpoints are below a number, by binary search.
struct Nearest {
    static constexpr int STEPS = 4;
    vf tables[STEPS];

    Nearest(const float* midpoints, int count, float, bool) {
        for (int step = 0; step < STEPS; step++) {
            float table[8];
            for (int i = 0; i < 8; i++) {
                const int at = ((2 * i + 1) << (STEPS - 1 - step)) - 1;
                table[i] = at < count ? midpoints[at] : __builtin_inff();
            }
            tables[step] = load(table);
        }
    }

    vi index_of(vf x) const {
        vi found = _mm256_setzero_si256();
        for (int step = 0; step < STEPS; step++) {
            const vf above = _mm256_cmp_ps(x, _mm256_permutevar8x32_ps(tables[step], found), _CMP_GT_OQ);
            found = _mm256_sub_epi32(_mm256_add_epi32(found, found), _mm256_castps_si256(above));
        }
        return found;
    }
};

inline vi with_sign(vi codes, vf x) {
    const vi negative = _mm256_srai_epi32(_mm256_castps_si256(x), 31), any = _mm256_cmpgt_epi32(codes, _mm256_setzero_si256());
    return _mm256_add_epi32(codes, _mm256_and_si256(_mm256_and_si256(negative, any), _mm256_set1_epi32(8)));
}

template <class Code>
inline void put_codes(const uint16_t* x, void* to, Code code) {
    const vi first = _mm256_packs_epi32(code(from_bf16(x)), code(from_bf16(x + 8)));
    const vi second = _mm256_packs_epi32(code(from_bf16(x + 16)), code(from_bf16(x + 24)));
    const vi order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order));
}
#endif

constexpr int HALVES = sizeof(vi) / 2;

inline int greatest(vi x) {
    // The instruction finds the least without a sign.
    const __m128i flipped = _mm_xor_si128(eight_greatest(x), _mm_set1_epi16(0x7fff));
    return int16_t(_mm_cvtsi128_si32(_mm_minpos_epu16(flipped)) ^ 0x7fff);
}

inline int least(vi x) {
    const __m128i flipped = _mm_xor_si128(eight_least(x), _mm_set1_epi16(int16_t(0x8000)));
    return int16_t(_mm_cvtsi128_si32(_mm_minpos_epu16(flipped)) ^ 0x8000);
}

// The largest magnitude of COUNT numbers, as bits of bfloat16.
template <int COUNT>
inline int largest_of(const uint16_t* x) {
    vi most = magnitudes(load_bytes(x));
    for (int i = HALVES; i < COUNT; i += HALVES) most = greater(most, magnitudes(load_bytes(x + i)));
    return greatest(most);
}

inline float number(int ordered) { return bf16_to_float(uint16_t(ordered < 0 ? ordered ^ 0x7fff : ordered)); }

// The largest and the least of COUNT numbers; false where one is not finite.
template <int COUNT>
inline bool extremes(const uint16_t* x, float& high, float& low) {
    vi most = in_order(load_bytes(x)), fewest = most;
    for (int i = HALVES; i < COUNT; i += HALVES) {
        const vi part = in_order(load_bytes(x + i));
        most = greater(most, part);
        fewest = lesser(fewest, part);
    }
    const int top = greatest(most), bottom = least(fewest);
    high = number(top);
    low = number(bottom);
    return top <= LARGEST && bottom >= ~LARGEST;
}

// What a group is packed by: the factor of its row (of Int4), and how much squares of errors in its columns count (of Int3
// and Vq2; or null).
struct Given {
    float factor;
    const float* importance;
};

// Each format packs one group of a row: codes a byte each, and what is stored beside them; false if not all is finite.

// formats/nf4.py
struct Nf4 {
    using Scale = uint16_t;
    static constexpr int64_t GROUP = 64;
    static constexpr bool HIGH_FIRST = true;
    Nearest levels;

    Nf4() : levels(midpoints().numbers, 15, 1.0f, true) {}

    bool pack(const uint16_t* x, uint8_t* codes, Scale* scale, const Given&) const {
        const int most = largest_of<GROUP>(x);
        if (most > LARGEST) return false;
        *scale = uint16_t(most);
        const float absmax = bf16_to_float(uint16_t(most));
        const vf factor = set1(1.0f / (absmax < 1e-38f ? 1e-38f : absmax));
        for (int i = 0; i < GROUP; i += 32)
            put_codes(x + i, codes + i, [&](vf numbers) { return levels.index_of(mul(numbers, factor)); });
        return true;
    }

    struct Midpoints {
        float numbers[15];
    };

    static Midpoints midpoints() {
        static constexpr double LEVELS[] = {
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        };
        Midpoints between;
        for (int i = 0; i < 15; i++) between.numbers[i] = float((LEVELS[i] + LEVELS[i + 1]) / 2);
        return between;
    }
};

// formats/int4.py
struct Int4 {
    struct Scale {
        uint8_t scale, zero;
    };
    static constexpr int64_t GROUP = 32;
    static constexpr bool HIGH_FIRST = false;

    // A group's range, with 0, in steps between codes.
    static bool steps_of(const uint16_t* x, float& low, float& exact) {
        float high;
        if (!extremes<GROUP>(x, high, low)) return false;
        low = low < 0 ? low : 0;
        exact = (high > 0 ? high : 0) / 15 - low / 15;
        return true;
    }

    static bool factor_of(const uint16_t* x, int64_t columns, float& factor) {
        float most = 0, low, exact;
        for (int64_t c = 0; c < columns; c += GROUP, most = exact > most ? exact : most)
            if (!steps_of(x + c, low, exact)) return false;
        factor = most / 255 < 1e-36f ? 1e-36f : most / 255;
        return true;
    }

    bool pack(const uint16_t* x, uint8_t* codes, Scale* to, const Given& given) const {
        const float factor = given.factor;
        float low, exact;
        if (!steps_of(x, low, exact)) return false;
        const float steps = __builtin_ceilf(exact / factor), scale = steps < 1 ? 1 : steps > 255 ? 255 : steps;
        const float step = scale * factor, zero = -low / step * 16 + ROUNDER - ROUNDER;
        *to = {uint8_t(scale), uint8_t(zero)};
        put_codes(x, codes, [&](vf numbers) {
            const vf code = add(div(numbers, set1(step)), set1(zero / 16)), rounded = sub(add(code, set1(ROUNDER)), set1(ROUNDER));
            return to_integers(min(max(rounded, set1(0.0f)), set1(15.0f)));
        });
        return true;
    }
};

// Halves are added to each other.
template <int PARTS>
inline float sum_of(vf (&parts)[PARTS]) {
    for (int count = PARTS / 2; count > 0; count /= 2)
        for (int i = 0; i < count; i++) parts[i] = add(parts[i], parts[i + count]);
    return sum(parts[0]);
}

// formats/int3.py
struct Int3 {
    using Scale = uint16_t;
    static constexpr int64_t GROUP = 32;
    static constexpr int PARTS = int(GROUP) / W;

    // Codes less 4.
    static vf steps(vf numbers, vf scale) {
        const vf rounded = sub(add(div(numbers, scale), set1(ROUNDER)), set1(ROUNDER));
        return min(max(rounded, set1(-4.0f)), set1(3.0f));
    }

    // Of the codes of a scale: their weighted products with the numbers, and their weighted squares.
    struct Sums {
        float product, whole;

        Sums(const vf (&numbers)[PARTS], const vf (&weights)[PARTS], float step) {
            vf products[PARTS], squares[PARTS];
            for (int i = 0; i < PARTS; i++) {
                const vf code = steps(numbers[i], set1(step)), weighted = mul(weights[i], code);
                products[i] = mul(weighted, numbers[i]);
                squares[i] = mul(weighted, code);
            }
            product = sum_of(products);
            whole = sum_of(squares);
        }
    };

    // The scale, in numbers, that loses least of those that are fitted to the codes of some first ones.
    static float best_step(const vf (&numbers)[PARTS], const vf (&weights)[PARTS]) {
        static constexpr float STARTS[] = {0.15f, 0.17f, 0.19f, 0.21f, 0.23f, 0.25f, 0.275f, 0.3f};
        float most = 0, step = -0.25f;
        for (float start : STARTS)
            for (int sign = -1; sign < 2; sign += 2) {
                const Sums found(numbers, weights, start * sign);
                const float gained = found.product * found.product / found.whole;
                if (gained > most) most = gained, step = found.product / found.whole;
            }
        const Sums found(numbers, weights, step);
        return found.whole > 0 ? found.product / found.whole : step;
    }

    bool pack(const uint16_t* x, uint8_t* codes, Scale* to, const Given& given) const {
        float high, low;
        if (!extremes<GROUP>(x, high, low)) return false;
        const float farthest = -low > high ? low : high, unit = __builtin_fabsf(farthest) < 1e-30f ? 1.0f : farthest;
        vf numbers[PARTS], squares[PARTS], weights[PARTS];
        for (int i = 0; i < PARTS; i++) {
            numbers[i] = div(from_bf16(x + i * W), set1(unit));
            weights[i] = squares[i] = mul(numbers[i], numbers[i]);
        }
        const vf mean = set1(sum_of(squares) / GROUP);
        for (int i = 0; i < PARTS; i++) weights[i] = add(weights[i], mean);
        if (given.importance)
            for (int i = 0; i < PARTS; i++) weights[i] = mul(SIMD(sqrt_ps)(weights[i]), load(given.importance + i * W));
        const float step = best_step(numbers, weights);
        const float most = bf16_to_float(LARGEST) / 4, scale = step * unit;
        *to = float_to_bf16(scale > most ? most : scale < -most ? -most : scale);
        const vf stored = set1(bf16_to_float(*to));
        put_codes(x, codes, [&](vf each) { return to_integers(add(steps(each, stored), set1(4.0f))); });
        return true;
    }
};

// formats/vq2.py
struct Vq2 {
    using Scale = uint16_t;
    static constexpr int64_t GROUP = 64;
    static constexpr int PARTS = int(GROUP) / W, PAIRS = PARTS / 2, NUM_POINTS = 16;
    float points[NUM_POINTS][2];

    Vq2() {
        static constexpr uint8_t POINTS[] = {0x61, 0x32, 0x83, 0x64, 0xa4, 0x66, 0xc6, 0x37,
                                             0x87, 0xa7, 0x09, 0x7a, 0xba, 0xea, 0x2c, 0x5f};
        for (int i = 0; i < NUM_POINTS; i++) {
            points[i][0] = float(POINTS[i] & 15) - 7.5f;
            points[i][1] = float(POINTS[i] >> 4) - 7.5f;
        }
    }

    // The first numbers of all pairs of a group, then the second ones: of eight columns, the i-th and the (4 + i)-th.
    using Numbers = vf[PARTS];

    template <class Column>
    static void in_pairs(Numbers& to, Column column) {
        alignas(64) float numbers[GROUP];
        for (int i = 0; i < GROUP; i++) numbers[i % 8 / 4 * (GROUP / 2) + i / 8 * 4 + i % 4] = column(i);
        for (int i = 0; i < PARTS; i++) to[i] = load(numbers + i * W);
    }

    // Of the points nearest to pairs: what they lose, less what all do; twice their products with the pairs; their codes
    // but for the sign.
    struct Found {
        vf lost[PAIRS], product[PAIRS], code[PAIRS];
    };

    __attribute__((always_inline)) void nearest(const Numbers& numbers, const Numbers& weights, float step, Found& found) const {
        for (int i = 0; i < PAIRS; i++) {
            const vf first = weights[i], second = weights[i + PAIRS];
            const vf x = mul(mul(first, div(numbers[i], set1(step))), set1(2.0f));
            const vf y = mul(mul(second, div(numbers[i + PAIRS], set1(step))), set1(2.0f));
            vf best = set1(__builtin_inff()), best_product = set1(0.0f), code = set1(0.0f);
            for (int k = 0; k < NUM_POINTS; k++) {
                const float a = points[k][0], b = points[k][1];
                const vf product = add(mul(x, set1(a)), mul(y, set1(b)));
                const vf lost = sub(add(mul(first, set1(a * a)), mul(second, set1(b * b))), abs(product));
                best_product = where_less(lost, best, product, best_product);
                code = where_less(lost, best, set1(float(k)), code);
                best = where_less(lost, best, lost, best);
            }
            found.lost[i] = best;
            found.product[i] = best_product;
            found.code[i] = code;
        }
    }

    // The scale, in numbers, that loses least of those that are fitted to the points for some first ones.
    float best_step(const Numbers& numbers, const Numbers& weights, float root) const {
        static constexpr float STARTS[] = {0.23f, 0.27f, 0.32f, 0.37f, 0.42f};
        float most = 0, step = 1;
        for (float start : STARTS) {
            const float tried = root * start > 0 ? root * start : 1;
            Found found;
            nearest(numbers, weights, tried, found);
            vf squares[PAIRS];
            for (int i = 0; i < PAIRS; i++) {
                found.product[i] = abs(found.product[i]);
                squares[i] = add(found.lost[i], found.product[i]);
            }
            const float whole = sum_of(squares), fitted = sum_of(found.product) * 0.5f / whole * tried;
            const float gained = fitted * fitted * whole;
            if (gained > most) most = gained, step = fitted;
        }
        return step;
    }

    bool pack(const uint16_t* x, uint8_t* codes, Scale* to, const Given& given) const {
        const int most = largest_of<GROUP>(x);
        if (most > LARGEST) return false;
        float farthest = bf16_to_float(uint16_t(most));
        if (farthest < 1e-30f) farthest = 0;
        Numbers columns, numbers, weights, squares;
        in_pairs(columns, [&](int i) { return bf16_to_float(x[i]); });
        for (int i = 0; i < PARTS; i++) {
            numbers[i] = div(columns[i], set1(farthest == 0 ? 1 : farthest));
            weights[i] = squares[i] = mul(numbers[i], numbers[i]);
        }
        const float mean = sum_of(squares) / GROUP;
        for (int i = 0; i < PARTS; i++) weights[i] = SIMD(sqrt_ps)(add(weights[i], set1(mean)));
        if (given.importance) {
            in_pairs(squares, [&](int i) { return given.importance[i]; });
            for (int i = 0; i < PARTS; i++) weights[i] = mul(weights[i], squares[i]);
        }
        const float scale = best_step(numbers, weights, __builtin_sqrtf(mean)) * farthest, greatest = bf16_to_float(LARGEST) / 8;
        *to = float_to_bf16(scale > greatest ? greatest : scale);
        const float stored = bf16_to_float(*to);
        Found found;
        nearest(columns, weights, stored == 0 ? 1 : stored, found);
        alignas(64) int32_t numbered[GROUP / 2];
        for (int i = 0; i < PAIRS; i++)
            store_bytes(numbered + i * W, to_integers(found.code[i]) | left_by(right_by((vi)found.product[i], 31), 4));
        for (int i = 0; i < GROUP / 2; i++) codes[i / 4 * 8 + i % 4] = uint8_t(numbered[i]);
        return true;
    }
};

// formats/mxfp4.py
struct Mxfp4 {
    using Scale = uint8_t;
    static constexpr int64_t GROUP = 32;
    static constexpr bool HIGH_FIRST = false;
    static constexpr float MIDPOINTS[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    Nearest levels;

    Mxfp4() : levels(MIDPOINTS, 7, 8.0f, false) {}

    bool pack(const uint16_t* x, uint8_t* codes, Scale* scale, const Given&) const {
        const int most = largest_of<GROUP>(x);
        if (most > LARGEST) return false;
        // The exponent of the largest less that of 6, which is 2; subnormal numbers have the smallest scale.
        const int exponent = most >> 7 < 2 ? 0 : (most >> 7) - 2;
        *scale = uint8_t(exponent);
        const vf factor = set1(bf16_to_float(uint16_t((254 - exponent) << 7)));
        put_codes(x, codes, [&](vf numbers) {
            const vf scaled = mul(numbers, factor);
            return with_sign(levels.index_of(abs(scaled)), scaled);
        });
        return true;
    }
};
constexpr float Mxfp4::MIDPOINTS[];

using Rows = moedge_packing;

// The groups of `count` columns of a row from `first` on, whose scales are `step` apart.
template <class Format>
bool pack_groups(const Format& format, const Rows& some, int64_t row, int64_t first, int64_t count, uint8_t* codes,
                 typename Format::Scale* scales, int64_t step) {
    const uint16_t* x = some.x + row * some.stride + first;
    for (int64_t c = 0; c < count; c += Format::GROUP, scales += step) {
        const Given given = {some.factors ? some.factors[row] : 0, some.importance ? some.importance + first + c : nullptr};
        if (!format.pack(x + c, codes + c, scales, given)) return false;
    }
    return true;
}

// The factors of COUNT rows at most, from `first` on; false if not all is finite.
template <int64_t COUNT>
bool find_factors(const Rows& some, int64_t first) {
    for (int64_t r = first; some.factors && r < some.rows && r < first + COUNT; r++)
        if (!Int4::factor_of(some.x + r * some.stride, some.columns, some.factors[r])) return false;
    return true;
}

// Joins pairs of codes to a byte; a multiple of 32 of them.
void join_pairs(const uint8_t* codes, int64_t count, bool high_first, uint8_t* to) {
    const __m128i weights = _mm_set1_epi16(high_first ? 0x0110 : 0x1001);
    for (int64_t i = 0; i < count; i += 32) {
        const __m128i first = _mm_maddubs_epi16(_mm_loadu_si128((const __m128i*)(codes + i)), weights);
        const __m128i second = _mm_maddubs_epi16(_mm_loadu_si128((const __m128i*)(codes + i + 16)), weights);
        _mm_storeu_si128((__m128i*)(to + i / 2), _mm_packus_epi16(first, second));
    }
}

template <class Format>
bool pack_rows(const Rows& some) {
    const Format format;
    const int64_t groups = some.columns / Format::GROUP;
    for (int64_t r = 0; r < some.rows; r++) {
        if (!find_factors<1>(some, r)) return false;
        for (int64_t c = 0; c < some.columns; c += COLUMNS) {
            uint8_t codes[COLUMNS];
            const int64_t count = some.columns - c < COLUMNS ? some.columns - c : COLUMNS;
            auto* scales = (typename Format::Scale*)some.scales + r * groups + c / Format::GROUP;
            if (!pack_groups(format, some, r, c, count, codes, scales, 1)) return false;
            join_pairs(codes, count, Format::HIGH_FIRST, some.codes + (r * some.columns + c) / 2);
        }
    }
    return true;
}

// The two rows that share bytes: codes of the first in the low bits.
inline __m128i shared(const uint8_t* low, const uint8_t* high) {
    return _mm_or_si128(_mm_loadu_si128((const __m128i*)low), _mm_slli_epi16(_mm_loadu_si128((const __m128i*)high), 4));
}

// Transposes eight rows of eight pairs of bytes in three steps, each of which moves the highest bit of the row's number
// behind those of the column's.
inline void transpose_pairs(__m128i (&rows)[8]) {
    for (int step = 0; step < 3; step++) {
        __m128i next[8];
        for (int i = 0; i < 4; i++) {
            next[2 * i] = _mm_unpacklo_epi16(rows[i], rows[i + 4]);
            next[2 * i + 1] = _mm_unpackhi_epi16(rows[i], rows[i + 4]);
        }
        memcpy(rows, next, sizeof(next));
    }
}

// Writes columns of a block of rows in order `tiles`: of each pair of columns the pairs of 16 rows, joined with those of
// the other 16. A code has SIXTEENTHS of a bit.
struct Tiles {
    static constexpr int64_t ROWS = 32, SIXTEENTHS = 64;

    static void put(const uint8_t (&codes)[ROWS][COLUMNS], int64_t count, uint8_t* to) {
        for (int64_t c = 0; c < count; c += 16)
            for (int half = 0; half < 2; half++) {
                __m128i rows[8];
                for (int i = 0; i < 8; i++) rows[i] = shared(codes[8 * half + i] + c, codes[8 * half + 16 + i] + c);
                transpose_pairs(rows);
                for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i*)(to + (c / 2 + i) * 32 + 16 * half), rows[i]);
            }
    }
};

// The same of three-bit codes (tiles.h).
struct Tiles3 : Tiles {
    static constexpr int64_t SIXTEENTHS = 48;

    static void put(const uint8_t (&codes)[ROWS][COLUMNS], int64_t count, uint8_t* to) {
        for (int64_t c = 0; c < count; c += 32, to += 384) {
            uint32_t low[4][16] = {}, high[2][16] = {};
            for (int at = 0; at < 16; at++)
                for (int i = 0; i < 16; i++) {
                    uint32_t four;
                    memcpy(&four, codes[at % 2 * 16 + i] + c + at / 2 * 4, 4);
                    low[at / 4][i] |= (four & 0x03030303) << (at % 4 * 2);
                    high[at / 8][i] |= (four >> 2 & 0x01010101) << (at % 8);
                }
            memcpy(to, low, sizeof(low));
            memcpy(to + sizeof(low), high, sizeof(high));
        }
    }
};

// The same of points of pairs, whose code lies at the first of two columns.
struct TilesOfPairs : Tiles {
    static constexpr int64_t SIXTEENTHS = 40;

    static void put(const uint8_t (&codes)[ROWS][COLUMNS], int64_t count, uint8_t* to) {
        for (int64_t c = 0; c < count; c += 32, to += 320) {
            uint32_t low[4][16] = {}, high[16] = {};
            for (int at = 0; at < 8; at++)
                for (int i = 0; i < 16; i++) {
                    uint32_t four;
                    memcpy(&four, codes[at % 2 * 16 + i] + c + at / 2 * 8, 4);
                    low[at / 2][i] |= (four & 0x0f0f0f0f) << (at % 2 * 4);
                    high[i] |= (four >> 4 & 0x01010101) << at;
                }
            memcpy(to, low, sizeof(low));
            memcpy(to + sizeof(low), high, sizeof(high));
        }
    }
};

// Of whole blocks of rows.
template <class Format, class Order>
bool pack_blocks(const Rows& some) {
    using Scale = typename Format::Scale;
    const Format format;
    const int64_t groups = some.columns / Format::GROUP;
    for (int64_t first = 0; first < some.rows; first += Order::ROWS) {
        if (!find_factors<Order::ROWS>(some, first)) return false;
        Scale* scales = (Scale*)some.scales + first * groups;
        for (int64_t c = 0; c < some.columns; c += COLUMNS) {
            uint8_t codes[Order::ROWS][COLUMNS];
            const int64_t count = some.columns - c < COLUMNS ? some.columns - c : COLUMNS, group = c / Format::GROUP;
            for (int64_t r = 0; r < Order::ROWS; r++) {
                const uint16_t* x = some.x + (first + r) * some.stride + c;
                // Processors do not follow so many rows at once on their own.
                if (r + AHEAD < Order::ROWS)
                    for (int64_t i = 0; i < count; i += 32) _mm_prefetch((const char*)(x + AHEAD * some.stride + i), _MM_HINT_T0);
                if (!pack_groups(format, some, first + r, c, count, codes[r], scales + group * Order::ROWS + r, Order::ROWS)) return false;
            }
            Order::put(codes, count, some.codes + (first * some.columns + c * Order::ROWS) * Order::SIXTEENTHS / 128);
        }
    }
    return true;
}

// formats/int8.py, a scale for a row
bool pack_int8(const Rows& some) {
    const int64_t whole = some.columns / 32 * 32;
    for (int64_t r = 0; r < some.rows; r++) {
        const uint16_t* x = some.x + r * some.stride;
        int8_t* codes = (int8_t*)some.codes + r * some.columns;
        vi parts = vi();
        for (int64_t c = 0; c < whole; c += HALVES) parts = greater(parts, magnitudes(load_bytes(x + c)));
        int most = greatest(parts);
        for (int64_t c = whole; c < some.columns; c++) most = (x[c] & 0x7fff) > most ? x[c] & 0x7fff : most;
        if (most > LARGEST) return false;
        const float absmax = bf16_to_float(uint16_t(most)), scale = (absmax < 1e-30f ? 1e-30f : absmax) / 127;
        ((float*)some.scales)[r] = scale;
        const auto code = [&](vf numbers) {
            const vf rounded = sub(add(div(numbers, set1(scale)), set1(ROUNDER)), set1(ROUNDER));
            return to_integers(min(max(rounded, set1(-127.0f)), set1(127.0f)));
        };
        for (int64_t c = 0; c < whole; c += 32) put_codes(x + c, codes + c, code);
        if (whole == some.columns) continue;
        uint16_t last[32] = {};
        int8_t last_codes[32];
        memcpy(last, x + whole, size_t(some.columns - whole) * 2);
        put_codes(last, last_codes, code);
        memcpy(codes + whole, last_codes, size_t(some.columns - whole));
    }
    return true;
}

bool pack(const Rows& some) {
    const bool tiles = some.order == moedge_order::TILES;
    switch (some.format) {
        case moedge_weight_format::NF4: return tiles ? pack_blocks<Nf4, Tiles>(some) : pack_rows<Nf4>(some);
        case moedge_weight_format::MXFP4: return tiles ? pack_blocks<Mxfp4, Tiles>(some) : pack_rows<Mxfp4>(some);
        case moedge_weight_format::INT4: return tiles ? pack_blocks<Int4, Tiles>(some) : pack_rows<Int4>(some);
        case moedge_weight_format::INT8: return pack_int8(some);
        case moedge_weight_format::INT3: return pack_blocks<Int3, Tiles3>(some);
        case moedge_weight_format::VQ2: return pack_blocks<Vq2, TilesOfPairs>(some);
    }
    return false;
}

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_pack)(moedge_packing* packing) { packing->finite = pack(*packing); }
