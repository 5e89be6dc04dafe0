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

// What a group is packed by: the factor of its row (of Int4), and how much squares of errors in its columns count (of Int3;
// or null).
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

// formats/int3.py
struct Int3 {
    using Scale = uint16_t;
    static constexpr int64_t GROUP = 32;
    static constexpr int PARTS = int(GROUP) / W;

    // Halves are added to each other.
    static float sum_of(vf (&parts)[PARTS]) {
        for (int count = PARTS / 2; count > 0; count /= 2)
            for (int i = 0; i < count; i++) parts[i] = add(parts[i], parts[i + count]);
        return sum(parts[0]);
    }

    // Codes less 4.
    static vf steps(vf numbers, vf scale) {
        const vf rounded = sub(add(div(numbers, scale), set1(ROUNDER)), set1(ROUNDER));
        return min(max(rounded, set1(-4.0f)), set1(3.0f));
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
        float step = -0.25f;
        for (int fit = 0; fit < 2; fit++) {
            vf found[PARTS];
            for (int i = 0; i < PARTS; i++) {
                const vf code = steps(numbers[i], set1(step)), weighted = mul(weights[i], code);
                found[i] = mul(weighted, numbers[i]);
                squares[i] = mul(weighted, code);
            }
            const float whole = sum_of(squares);
            if (whole > 0) step = sum_of(found) / whole;
        }
        const float most = bf16_to_float(LARGEST) / 4, scale = step * unit;
        *to = float_to_bf16(scale > most ? most : scale < -most ? -most : scale);
        const vf stored = set1(bf16_to_float(*to));
        put_codes(x, codes, [&](vf each) { return to_integers(add(steps(each, stored), set1(4.0f))); });
        return true;
    }
};

// formats/int2.py
struct Int2 {
    using Scale = uint8_t;
    static constexpr int64_t GROUP = 32;
    static constexpr int PARTS = int(GROUP) / W, STATES = 64, VECTORS = STATES / W;
    static constexpr float STEP = 0.04413485f, FACTOR = 0.0053f;
    // By the oldest code and the state that is reached.
    float values[4][STATES];

    Int2() {
        static constexpr int NEWEST[16] = {24, 50, 61, 37, 58, 0, 36, 21, 38, 47, 16, 75, 12, 26, 42, 54};
        static constexpr int MIDDLE[16] = {12, 20, 27, 0, 15, 52, 30, 26, 37, 31, 3, 42, 37, 18, 22, 10};
        for (int i = 0; i < 256; i++) {
            const int a = i >> 6, b = i >> 4 & 3, c = i >> 2 & 3, d = i & 3;
            values[a][i & 63] = float(NEWEST[(c + 4 * d) ^ (a + 4 * b)] + MIDDLE[b + 4 * c] - 62);
        }
    }

    // A group divided by its farthest number, the squares of that and their mean, and the step for its deviation.
    struct Numbers {
        float unit, mean, step;
        vf numbers[PARTS], squares[PARTS];

        bool read(const uint16_t* x) {
            const int most = largest_of<GROUP>(x);
            if (most > LARGEST) return false;
            unit = bf16_to_float(uint16_t(most));
            if (unit < 1e-30f) unit = 1;
            vf sums[PARTS];
            for (int i = 0; i < PARTS; i++) {
                numbers[i] = div(from_bf16(x + i * W), set1(unit));
                sums[i] = squares[i] = mul(numbers[i], numbers[i]);
            }
            mean = Int3::sum_of(sums) / GROUP;
            step = __builtin_sqrtf(mean) * unit * STEP;
            return true;
        }
    };

    static bool factor_of(const uint16_t* x, int64_t columns, float& factor) {
        float most = 0;
        for (int64_t c = 0; c < columns; c += GROUP) {
            Numbers group;
            if (!group.read(x + c)) return false;
            most = group.step > most ? group.step : most;
        }
        most *= FACTOR;
        factor = most < 1e-36f ? 1e-36f : most;
        return true;
    }

    static float scale_of(float step, float factor) {
        const float rounded = step / factor + ROUNDER - ROUNDER;
        return rounded < 1 ? 1 : rounded > 255 ? 255 : rounded;
    }

    // Column 4 (t % 8) + t / 8 of a group is step t of the walk.
    static void walk(const float* columns, float* steps) {
        for (int t = 0; t < GROUP; t++) steps[t] = columns[4 * (t % 8) + t / 8];
    }

    struct Forgotten {
        alignas(64) int32_t codes[GROUP][STATES];
    };

    // The least costs of reaching every state by the steps from `first` on, around the group, and the oldest code that each
    // step forgets on the way there, which is in the lowest bits of a cost, too.
    void costs(const float* numbers, const float* weights, int first, float* least, Forgotten& forgotten) const {
        vf before[VECTORS];
        for (int i = 0; i < VECTORS; i++) before[i] = load(least + i * W);
        for (int t = 0; t < GROUP; t++) {
            const vf number = set1(numbers[(first + t) % GROUP]), weight = set1(weights[(first + t) % GROUP]);
            vf after[VECTORS];
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++)
#pragma GCC unroll 4
                for (int a = 0; a < 4; a++) {
                    const int from = a * 16 + i * W / 4;
                    const vf apart = sub(number, load(values[a] + i * W));
                    const vf cost = add(mul(mul(apart, apart), weight), each_four_times(before[from / W], from % W));
                    const vf tried = (vf)(mask((vi)cost, all_lanes(~3)) | all_lanes(a));
                    after[i] = a ? min(after[i], tried) : tried;
                }
            for (int i = 0; i < VECTORS; i++) {
                before[i] = after[i];
                store_bytes(forgotten.codes[t] + i * W, mask((vi)after[i], all_lanes(3)));
            }
        }
        for (int i = 0; i < VECTORS; i++) store(least + i * W, before[i]);
    }

    // W / 4 lanes from `first` on.
    static vf each_four_times(vf x, int first) {
#if MOEDGE_LEVEL >= 2
        const vi lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        return _mm512_permutexvar_ps(add_lanes(lanes, all_lanes(first)), x);
#else
        return _mm256_permutevar8x32_ps(x, add_lanes(_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), all_lanes(first)));
#endif
    }

    // The states that the steps reached and the values there; the last one reached `state`.
    void trace(const Forgotten& forgotten, int state, int* states, float* found) const {
        for (int t = int(GROUP) - 1; t >= 0; t--) {
            const int code = forgotten.codes[t][state];
            states[t] = state;
            found[t] = values[code][state];
            state = code * 16 + state / 4;
        }
    }

    // Values of walks that begin in their middle; the state with which they came past the end of the group.
    int begin(const float* numbers, const float* weights, float* found) const {
        alignas(64) float least[STATES] = {};
        Forgotten forgotten;
        costs(numbers, weights, GROUP / 2, least, forgotten);
        int32_t best = 0x7fffffff;
        for (int i = 0; i < STATES; i++) {
            int32_t bits;
            memcpy(&bits, least + i, 4);
            bits = (bits & ~63) | i;
            best = bits < best ? bits : best;
        }
        int states[GROUP];
        float turned[GROUP];
        trace(forgotten, best & 63, states, turned);
        for (int t = 0; t < GROUP; t++) found[(t + GROUP / 2) % GROUP] = turned[t];
        return states[GROUP / 2 - 1];
    }

    bool pack(const uint16_t* x, uint8_t* codes, Scale* to, const Given& given) const {
        Numbers group;
        if (!group.read(x)) return false;
        alignas(64) float columns[GROUP], numbers[GROUP], weights[GROUP], steps[GROUP], found[GROUP];
        const float mean = group.mean > 0 ? group.mean : 1;
        for (int i = 0; i < PARTS; i++) {
            const vf weight = add(group.squares[i], set1(mean));
            store(columns + i * W, given.importance ? mul(weight, load(given.importance + i * W)) : weight);
        }
        walk(columns, weights);
        for (int i = 0; i < PARTS; i++) store(columns + i * W, group.numbers[i]);
        walk(columns, numbers);
        const auto scaled = [&](float scale) {
            for (int i = 0; i < PARTS; i++) store(columns + i * W, div(from_bf16(x + i * W), set1(scale * given.factor)));
            walk(columns, steps);
        };
        scaled(scale_of(group.step, given.factor));
        const int state = begin(steps, weights, found);
        vf wholes[PARTS], parts[PARTS];
        for (int i = 0; i < PARTS; i++) {
            const vf value = load(found + i * W), weighted = mul(load(weights + i * W), value);
            wholes[i] = mul(weighted, value);
            parts[i] = mul(weighted, load(numbers + i * W));
        }
        const float whole = Int3::sum_of(wholes);
        const float step = whole > 0 ? Int3::sum_of(parts) / whole * group.unit : group.step;
        const float scale = scale_of(step, given.factor);
        *to = uint8_t(scale);
        scaled(scale);
        alignas(64) float least[STATES];
        for (float& cost : least) cost = 1e30f;
        least[state] = 0;
        Forgotten forgotten;
        costs(steps, weights, 0, least, forgotten);
        int states[GROUP];
        trace(forgotten, state, states, found);
        for (int t = 0; t < GROUP; t++) codes[4 * (t % 8) + t / 8] = uint8_t(states[t] & 3);
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

// What has no factors is never asked for them.
template <class Format>
struct FactorsOf : Int4 {
    static bool find(const uint16_t* x, int64_t columns, float& factor) { return factor_of(x, columns, factor); }
};
template <>
struct FactorsOf<Int2> : Int2 {
    static bool find(const uint16_t* x, int64_t columns, float& factor) { return factor_of(x, columns, factor); }
};

// The factors of COUNT rows at most, from `first` on, of Int4 and Int2; false if not all is finite.
template <class Format, int64_t COUNT>
bool find_factors(const Rows& some, int64_t first) {
    for (int64_t r = first; some.factors && r < some.rows && r < first + COUNT; r++)
        if (!FactorsOf<Format>::find(some.x + r * some.stride, some.columns, some.factors[r])) return false;
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
        if (!find_factors<Format, 1>(some, r)) return false;
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
// the other 16.
struct Tiles {
    static constexpr int64_t ROWS = 32, BITS = 4;

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
    static constexpr int64_t BITS = 3;

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

// The same of two-bit codes (tiles.h).
struct Tiles2 : Tiles {
    static constexpr int64_t BITS = 2;

    static void put(const uint8_t (&codes)[ROWS][COLUMNS], int64_t count, uint8_t* to) {
        for (int64_t c = 0; c < count; c += 32, to += 256) {
            uint32_t halves[2][ROWS] = {};
            for (int q = 0; q < 8; q++)
                for (int i = 0; i < ROWS; i++) {
                    uint32_t four;
                    memcpy(&four, codes[i] + c + 4 * q, 4);
                    halves[q / 4][i] |= four << (q % 4 * 2);
                }
            memcpy(to, halves, sizeof(halves));
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
        if (!find_factors<Format, Order::ROWS>(some, first)) return false;
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
            Order::put(codes, count, some.codes + (first * some.columns + c * Order::ROWS) * Order::BITS / 8);
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
        case moedge_weight_format::INT2: return pack_blocks<Int2, Tiles2>(some);
    }
    return false;
}

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_pack)(moedge_packing* packing) { packing->finite = pack(*packing); }
