// Experts in order `rows` (formats/format.py), in which a GPU reads them, for few rows each: where such weights lie in
// host memory, a processor computes some experts while others cross the link to the GPU. matmul/rows.py calls it.
//
// A result is a sum in float32 over the columns of value(code) * scale + zero times x. Its bits depend on the row and the
// matrix alone. What is between the matrices is float32, or bfloat16 where instructions multiply that (Words).
#include "activations.h"
#include "tiles.h"
#include "work.h"

namespace {

using Format = moedge_format;

constexpr int PER_CHUNK = CHUNK / W;
// Rows of a matrix that one item computes: those of a chunk of the next matrix, or so many.
constexpr int64_t ITEM_ROWS = 64;

// What lies in a plane of codes: codes, or floats.
enum class Kind { INT4, NF4, E2M1, INT8, BF16, FP16, FP32 };

constexpr bool is_nibbles(Kind kind) { return kind <= Kind::E2M1; }
constexpr int64_t chunk_nbytes(Kind kind) {
    return is_nibbles(kind) ? CHUNK / 2 : kind == Kind::INT8 ? CHUNK : kind == Kind::FP32 ? 4 * CHUNK : 2 * CHUNK;
}

// Numbers of a chunk: of nibbles first those of the even columns, then those of the odd ones.
template <Kind KIND>
struct Reader {
#if MOEDGE_LEVEL >= 2
    vf table;
#else
    vf low, high;
#endif

    Reader() {
        // Codes of INT4 count from 0 here: their zeros are moved instead.
        float numbers[16];
        for (int i = 0; i < 16; i++)
            numbers[i] = KIND == Kind::INT4 ? float(i) : TABLES[KIND == Kind::NF4 ? int(Type::NF4) : int(Type::E2M1)][i];
#if MOEDGE_LEVEL >= 2
        table = load(numbers);
#else
        low = load(numbers);
        high = load(numbers + 8);
#endif
    }

    // The numbers of the low four bits of lanes.
    vf number_of(vi codes) const {
#if MOEDGE_LEVEL >= 2
        return _mm512_permutexvar_ps(codes, table);
#else
        if (KIND == Kind::INT4) return to_floats(codes & all_lanes(15));
        const vf upper = (vf)left_by(codes, 28);
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), upper);
#endif
    }

    __attribute__((always_inline)) void read(const uint8_t* at, vf (&made)[PER_CHUNK]) const {
#pragma GCC unroll 8
        for (int v = 0; v < PER_CHUNK; v++) {
            if (is_nibbles(KIND)) {
                const bool lower = (v < PER_CHUNK / 2) != (KIND == Kind::NF4);
                const vi codes = from_bytes(at + v % (PER_CHUNK / 2) * W);
                made[v] = number_of(lower ? codes : right_by(codes, 4));
            } else if (KIND == Kind::INT8) {
                made[v] = from_int8((const int8_t*)at + v * W);
            } else if (KIND == Kind::BF16) {
                made[v] = from_bf16((const uint16_t*)at + v * W);
            } else if (KIND == Kind::FP16) {
                made[v] = from_half((const uint16_t*)at + v * W);
            } else {
                made[v] = load((const float*)at + v * W);
            }
        }
    }
};

// Number `at` of a plane.
inline float number_at(Scales type, const uint8_t* plane, int64_t at) {
    if (type == Scales::FLOAT32) return ((const float*)plane)[at];
    if (type == Scales::FLOAT16) return half_to_float(((const uint16_t*)plane)[at]);
    if (type == Scales::BFLOAT16) return bf16_to_float(((const uint16_t*)plane)[at]);
    return float(plane[at]);
}

// Bytes of codes that are requested before they are multiplied. What is behind the last is read in vain.
constexpr int64_t REQUESTED = 4096;
inline void request(const uint8_t* at) { _mm_prefetch((const char*)at, _MM_HINT_T0); }

inline vf numbers_at(Scales type, const uint8_t* plane, int64_t at) {
    if (type == Scales::FLOAT32) return load((const float*)plane + at);
    if (type == Scales::FLOAT16) return from_half((const uint16_t*)plane + at);
    if (type == Scales::BFLOAT16) return from_bf16((const uint16_t*)plane + at);
    return small_integers(plane + at);
}

struct RowMatrix : moedge_row_matrix {
    Kind kind;

    explicit RowMatrix(const moedge_row_matrix& matrix) : moedge_row_matrix(matrix) {
        if (scales == nullptr)
            kind = scales_type == Scales::BFLOAT16 ? Kind::BF16 : scales_type == Scales::FLOAT16 ? Kind::FP16 : Kind::FP32;
        else
            kind = codes_type == Type::INT4 ? Kind::INT4 : codes_type == Type::NF4 ? Kind::NF4
                 : codes_type == Type::E2M1 ? Kind::E2M1 : Kind::INT8;
    }

    // The scale and the zero of each group of a row: a weight is (number - middle) * scale + zero, zeros moved by `middle`.
    void factors_of(int64_t row, float* scale, float* zero, float middle) const {
        const int64_t groups = columns / group, first = row * groups;
        if (scales_type == Scales::PAIRS) return pairs(row, scale, zero, middle);
        // Of rows that come soon.
        const int64_t width = scales_type == Scales::FLOAT32 ? 4 : scales_type == Scales::UINT8 ? 1 : 2;
        for (int64_t at = 0; at < groups * width; at += 64) {
            request(scales + (first + 4 * groups) * width + at);
            if (zeros != nullptr) request(zeros + (first + 4 * groups) * width + at);
        }
        int64_t g = 0;
        for (; g + W <= groups; g += W) {
            vf each = scales_type == Scales::UINT8 ? powers_of_two(scales + first + g) : numbers_at(scales_type, scales, first + g);
            vf moved = sub(set1(0.0f), mul(set1(middle), each));
            if (zeros != nullptr) moved = mul(sub(set1(8 - middle), small_integers(zeros + first + g)), each);
            store(scale + g, each);
            store(zero + g, moved);
        }
        for (; g < groups; g++) {
            float each = number_at(scales_type, scales, first + g);
            if (scales_type == Scales::UINT8) {
                const uint32_t bits = uint32_t(scales[first + g]) << 23;
                memcpy(&each, &bits, 4);
            }
            zero[g] = zeros == nullptr ? 0.0f - middle * each : (8 - middle - float(zeros[first + g])) * each;
            scale[g] = each;
        }
    }

    bool has_zeros() const { return zeros != nullptr || scales_type == Scales::PAIRS; }

    // The same of scales and zeros beside each other, with the row's factor.
    void pairs(int64_t row, float* scale, float* zero, float middle) const {
        const int64_t groups = columns / group;
        const uint8_t* from = scales + 2 * row * groups;
        for (int64_t at = 0; at < 2 * groups; at += 64) request(from + 8 * groups + at);
        int64_t g = 0;
        for (; g + W <= groups; g += W) {
            const vi both = pairs_of_words(from + 2 * g);
            const vf each = mul(to_floats(both & all_lanes(255)), set1(factors[row]));
            store(scale + g, each);
            store(zero + g, mul(fma(to_floats(right_by(both, 16)), set1(-1 / 16.0f), set1(8 - middle)), each));
        }
        for (; g < groups; g++) {
            scale[g] = float(from[2 * g]) * factors[row];
            zero[g] = (8 - middle - float(from[2 * g + 1]) / 16) * scale[g];
        }
    }
};

// Rows of a matrix that are multiplied at once by R rows of x: their sums stay in registers. Of one or two, reading them
// one after the other is faster, as processors read ahead so.
constexpr int at_once(int rows) {
    return MOEDGE_LEVEL >= 2 ? (rows <= 2 ? 1 : rows <= 4 ? 4 : 2) : 2;
}

// Columns whose codes become bfloat16 together. Levels of NF4 are rounded, as in tiles.h.
constexpr int64_t BLOCK = 2 * CHUNK;

inline bool has_words(const moedge_row_matrix& matrix, Kind kind, Format format) {
    const bool grouped = matrix.scales != nullptr, whole = matrix.group == CHUNK || matrix.group % BLOCK == 0;
    const bool known = (is_nibbles(kind) && MOEDGE_LEVEL != 2) || (kind == Kind::BF16 && MOEDGE_LEVEL >= 3);
    return format == Format::MOEDGE_BF16 && known && matrix.columns % BLOCK == 0 && (whole || !grouped);
}

#if MOEDGE_LEVEL >= 3
// Products of bfloat16 in pairs, and for bfloat16 itself. Of x, the even columns of a block are first where codes are of half
// a byte.
template <Kind KIND, int R>
void multiply_words(const RowMatrix& matrix, int64_t first, int64_t end, const uint16_t* x, const float* x_sums, float* out, int64_t stride) {
    constexpr int N = at_once(R);
    constexpr bool CODES = is_nibbles(KIND);
    alignas(64) uint16_t entries[32];
    // Twice: the fifth bit of an index is a bit of another code.
    for (int i = 0; i < 32; i++) entries[i] = float_to_bf16(TABLES[KIND == Kind::INT4 ? 0 : KIND == Kind::NF4 ? 1 : 2][i & 15]);
    const vi table = load_bytes(entries);
    const int64_t blocks = matrix.columns / BLOCK, groups = matrix.columns / matrix.group, sums_of_row = CODES ? groups : 0;
    const int64_t row_nbytes = blocks * 2 * chunk_nbytes(KIND);
    // The groups of the lanes of a product, and how many blocks share a group.
    const bool halves = CODES && matrix.group == CHUNK;
    const vi lanes = halves ? _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0) : all_lanes(0);
    const int64_t in_group = CODES && !halves ? matrix.group / BLOCK : 1, step = halves ? 2 : 1;
    float scale[N][MOEDGE_ROW_GROUPS + W], zero[N][MOEDGE_ROW_GROUPS];
    for (int64_t row = first; row < end; row += N) {
        const uint8_t* at[N];
        vf sums[N][R];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const int64_t mine = row + n < end ? row + n : end - 1;
            at[n] = matrix.codes + mine * row_nbytes;
            if (CODES) matrix.factors_of(mine, scale[n], zero[n], 0);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[n][r] = set1(0.0f);
        }
        for (int64_t block = 0, group = 0; block < blocks; group += step)
            for (const int64_t stop = block + in_group; block < stop; block++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    const uint8_t* const from = at[n] + block * 2 * chunk_nbytes(KIND);
                    request(from + REQUESTED);
                    if (!CODES) {
#pragma GCC unroll 8
                        for (int half = 0; half < 2; half++)
#pragma GCC unroll 8
                            for (int r = 0; r < R; r++)
                                sums[n][r] = _mm512_dpbf16_ps(sums[n][r], (__m512bh)load_bytes(from + 64 * half),
                                                              (__m512bh)load_bytes(x + r * matrix.columns + block * BLOCK + CHUNK * half));
                        continue;
                    }
                    const vi codes = _mm512_cvtepu8_epi16(load_half(from)), upper = _mm512_srli_epi16(codes, 4);
                    const vi even = _mm512_permutexvar_epi16(KIND == Kind::NF4 ? upper : codes, table);
                    const vi odd = _mm512_permutexvar_epi16(KIND == Kind::NF4 ? codes : upper, table);
                    const vf by = _mm512_permutexvar_ps(lanes, load(scale[n] + group));
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const uint16_t* numbers = x + r * matrix.columns + block * BLOCK;
                        vf made = _mm512_dpbf16_ps(set1(0.0f), (__m512bh)even, (__m512bh)load_bytes(numbers));
                        made = _mm512_dpbf16_ps(made, (__m512bh)odd, (__m512bh)load_bytes(numbers + CHUNK));
                        sums[n][r] = fma(by, made, sums[n][r]);
                    }
                }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                if (row + n >= end) continue;
                float total = 0;
                if (CODES && matrix.has_zeros()) {
                    const float* of_row = x_sums + r * sums_of_row;
                    int64_t g = 0;
                    for (; g + W <= groups; g += W) sums[n][r] = fma(load(zero[n] + g), load(of_row + g), sums[n][r]);
                    for (; g < groups; g++) total += zero[n][g] * of_row[g];
                }
                out[r * stride + row + n - first] = sum(sums[n][r]) + total;
            }
    }
}
#elif MOEDGE_LEVEL == 1
// Where column `i` of a chunk is in a block of x, whose vectors of W have the order in which codes become numbers: by half
// bytes, by halves of 16 bytes, by even and odd ones; four lanes are of one chunk, and four of the next.
constexpr int place_of(int64_t chunk, int i) {
    const int byte = i / 2, vector = i % 2 * 4 + byte / 8 * 2 + byte % 2;
    return vector * W + int(chunk % 2) * 4 + byte % 8 / 2;
}

// The sums of row `r` of x by groups of a matrix.
inline void add_groups(const RowMatrix& matrix, const float* x, int64_t rows, int64_t r, float* sums) {
    const int64_t blocks = matrix.columns / BLOCK, in_group = matrix.group / CHUNK;
    memset(sums, 0, sizeof(float) * size_t(matrix.columns / matrix.group));
    for (int64_t block = 0, left = in_group; block < blocks; block++) {
        const float* const from = x + (block * rows + r) * BLOCK;
        vf total = load(from);
        for (int v = 1; v < BLOCK / W; v++) total = add(total, load(from + v * W));
        const __m128 pairs = _mm_hadd_ps(_mm256_castps256_ps128(total), _mm256_extractf128_ps(total, 1));
        const __m128 halves = _mm_hadd_ps(pairs, pairs);
        for (int half = 0; half < 2; half++) {
            *sums += _mm_cvtss_f32(half ? _mm_movehdup_ps(halves) : halves);
            if (--left == 0) sums++, left = in_group;
        }
    }
}

// Products as `multiply` makes them, of x [columns / BLOCK, rows, BLOCK]. Codes become floats by tables of the upper and the
// lower byte of bfloat16, with half of the instructions.
template <Kind KIND, int R>
void multiply_words(const RowMatrix& matrix, int64_t first, int64_t end, const float* x, int64_t rows, float* out, int64_t stride) {
    // So many rows of the matrix read a block of x from the first cache.
    constexpr int N = R <= 2 ? 2 : 4;
    uint8_t bytes[2][16];
    for (int i = 0; i < 16; i++) {
        const uint16_t entry = float_to_bf16(TABLES[KIND == Kind::INT4 ? 0 : KIND == Kind::NF4 ? 1 : 2][i]);
        bytes[0][i] = uint8_t(entry), bytes[1][i] = uint8_t(entry >> 8);
    }
    const vi lower = table_of(bytes[0]), upper = table_of(bytes[1]);
    const int64_t blocks = matrix.columns / BLOCK, groups = matrix.columns / matrix.group;
    const int64_t row_nbytes = blocks * 2 * chunk_nbytes(KIND);
    // The groups of the lanes of a vector, and how many blocks share a group.
    const bool halves = matrix.group == CHUNK;
    const int64_t in_group = halves ? 1 : matrix.group / BLOCK, step = halves ? 2 : 1;
    float scale[N][MOEDGE_ROW_GROUPS], zero[N][MOEDGE_ROW_GROUPS];
    float x_sums[R][MOEDGE_ROW_GROUPS];
    if (matrix.has_zeros())
        for (int r = 0; r < R; r++) add_groups(matrix, x, rows, r, x_sums[r]);
    const auto of_lanes = [&](const float* numbers) {
        return _mm256_set_m128(_mm_broadcast_ss(numbers + step - 1), _mm_broadcast_ss(numbers));
    };
    for (int64_t row = first; row < end; row += N) {
        const uint8_t* at[N];
        vf sums[N][R];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const int64_t mine = row + n < end ? row + n : end - 1;
            at[n] = matrix.codes + mine * row_nbytes;
            matrix.factors_of(mine, scale[n], zero[n], 0);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[n][r] = set1(0.0f);
        }
        for (int64_t block = 0, group = 0; block < blocks; group += step)
            for (const int64_t stop = block + in_group; block < stop; block++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    const uint8_t* const from = at[n] + block * 2 * chunk_nbytes(KIND);
                    request(from + REQUESTED);
                    const vf by = of_lanes(scale[n] + group);
                    const vi codes = load_bytes(from);
                    // Sums of one or two rows wait for each other less where there are two of each.
                    constexpr int PARTS = R <= 2 ? 2 : 1;
                    vf made[PARTS][R];
#pragma GCC unroll 2
                    for (int part = 0; part < PARTS; part++)
#pragma GCC unroll 8
                        for (int r = 0; r < R; r++) made[part][r] = set1(0.0f);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++) {
                        const vi nibbles = (half == 0) != (KIND == Kind::NF4) ? mask(codes, all_bytes(15)) : high_nibbles(codes);
                        const vi high = looked_up(upper, nibbles), low = looked_up(lower, nibbles);
                        const vi words[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
#pragma GCC unroll 4
                        for (int v = 0; v < 4; v++) {
                            const vf weights = (vf)(v % 2 ? words[v / 2] & all_lanes(int(0xffff0000)) : left_by(words[v / 2], 16));
#pragma GCC unroll 8
                            for (int r = 0; r < R; r++)
                                made[v % PARTS][r] = fma(weights, load(x + (block * rows + r) * BLOCK + (4 * half + v) * W), made[v % PARTS][r]);
                        }
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const vf total = PARTS == 2 ? add(made[0][r], made[PARTS - 1][r]) : made[0][r];
                        sums[n][r] = fma(by, total, sums[n][r]);
                    }
                }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                if (row + n < end) {
                    float total = 0;
                    if (matrix.has_zeros()) {
                        int64_t g = 0;
                        for (; g + W <= groups; g += W) sums[n][r] = fma(load(zero[n] + g), load(x_sums[r] + g), sums[n][r]);
                        for (; g < groups; g++) total += zero[n][g] * x_sums[r][g];
                    }
                    out[r * stride + row + n - first] = sum(sums[n][r]) + total;
                }
    }
}
#endif

// Products of R of the `rows` rows of x [columns / CHUNK, rows, CHUNK] with matrix rows `first` to `end`:
// out[r * stride + n - first].
template <Kind KIND, bool GROUPED, int R>
void multiply(const RowMatrix& matrix, int64_t first, int64_t end, const float* x, int64_t rows, float* out, int64_t stride) {
    constexpr int N = at_once(R);
    // Whether a chunk's products are summed by themselves, so that they do not wait for those of the chunk before.
    constexpr bool APART = MOEDGE_LEVEL == 1 && R > 4;
    const Reader<KIND> reader;
    const int64_t chunks = matrix.columns / CHUNK, in_group = GROUPED ? matrix.group / CHUNK : chunks;
    const int64_t row_nbytes = chunks * chunk_nbytes(KIND);
    float scale[N][MOEDGE_ROW_GROUPS], zero[N][MOEDGE_ROW_GROUPS];
    for (int64_t row = first; row < end; row += N) {
        const uint8_t* at[N];
        vf sums[N][R];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            // Of fewer rows the last one is multiplied again.
            const int64_t mine = row + n < end ? row + n : end - 1;
            at[n] = matrix.codes + mine * row_nbytes;
            if (matrix.scales != nullptr) matrix.factors_of(mine, scale[n], zero[n], KIND == Kind::INT4 ? 8 : 0);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[n][r] = set1(0.0f);
        }
        for (int64_t chunk = 0, group = 0; chunk < chunks; group++) {
            vf by[N], plus[N];
            if (GROUPED)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    by[n] = set1(scale[n][group]);
                    plus[n] = set1(zero[n][group]);
                }
            for (const int64_t stop = chunk + in_group; chunk < stop; chunk++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    vf weights[PER_CHUNK];
                    const uint8_t* const from = at[n] + chunk * chunk_nbytes(KIND);
                    request(from + REQUESTED);
                    reader.read(from, weights);
                    vf made[R];
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) made[r] = APART ? set1(0.0f) : sums[n][r];
#pragma GCC unroll 8
                    for (int v = 0; v < PER_CHUNK; v++) {
                        if (GROUPED) weights[v] = fma(weights[v], by[n], plus[n]);
#pragma GCC unroll 8
                        for (int r = 0; r < R; r++)
                            made[r] = fma(weights[v], load(x + (chunk * rows + r) * CHUNK + v * W), made[r]);
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) sums[n][r] = APART ? add(sums[n][r], made[r]) : made[r];
                }
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                if (row + n < end)
                    out[r * stride + row + n - first] = sum(sums[n][r]) * (GROUPED || matrix.scales == nullptr ? 1.0f : scale[n][0]);
    }
}

template <int COUNT>
struct Rows {
    static constexpr int value = COUNT;
};

// Calls run(R, done) for blocks of R rows, of which kernels are made.
template <class Run>
void for_blocks(int64_t rows, Run run) {
    for (int64_t done = 0, count; done < rows; done += count) {
        const int64_t left = rows - done;
        count = left >= 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : left;
        switch (count) {
            case 8: run(Rows<8>(), done); break;
            case 6: run(Rows<6>(), done); break;
            case 4: run(Rows<4>(), done); break;
            case 3: run(Rows<3>(), done); break;
            case 2: run(Rows<2>(), done); break;
            default: run(Rows<1>(), done);
        }
    }
}

// Rows of inputs of a matrix in the order in which its products read them.
struct RowInputs {
    const RowMatrix& matrix;
    float* memory;
    int64_t rows;
    bool words;

    RowInputs(const RowMatrix& weights, Format format, float* scratch, int64_t num_rows) : matrix(weights), memory(scratch), rows(num_rows) {
        words = has_words(weights, weights.kind, format);
    }

    // The sums of a row's groups, where products are of words; behind all rows.
    float* sums() const { return (float*)((uint16_t*)memory + rows * matrix.columns); }

    void put_chunk(const float* from, int64_t row, int64_t chunk) const {
        const bool nibbles = is_nibbles(matrix.kind);
        if (!words) {
            float* to = memory + (chunk * rows + row) * CHUNK;
            for (int i = 0; i < CHUNK; i++) to[nibbles ? i / 2 + i % 2 * (CHUNK / 2) : i] = from[i];
            return;
        }
#if MOEDGE_LEVEL == 1
        float* const block = memory + (chunk / 2 * rows + row) * BLOCK;
        for (int i = 0; i < CHUNK; i++) block[place_of(chunk, i)] = from[i];
#else
        uint16_t numbers[CHUNK];
        for (int i = 0; i < CHUNK; i += W) to_bf16(load(from + i), numbers + i);
        uint16_t* const to = (uint16_t*)memory + row * matrix.columns + (nibbles ? chunk / 2 * 2 * CHUNK + chunk % 2 * (CHUNK / 2) : chunk * CHUNK);
        for (int i = 0; i < CHUNK; i++) to[nibbles ? i / 2 + i % 2 * CHUNK : i] = numbers[i];
        if (!nibbles) return;
        float total = 0;
        for (int i = 0; i < CHUNK; i++) total += bf16_to_float(numbers[i]);
        float& sum_of_group = sums()[row * (matrix.columns / matrix.group) + chunk * CHUNK / matrix.group];
        sum_of_group = chunk * CHUNK % matrix.group ? sum_of_group + total : total;
#endif
    }

    template <Kind KIND, bool GROUPED>
    void multiply_by(int64_t first, int64_t end, float* out, int64_t stride) const {
        for_blocks(rows, [&](auto count, int64_t done) {
            constexpr int R = decltype(count)::value;
#if MOEDGE_LEVEL >= 3
            if constexpr (is_nibbles(KIND) || KIND == Kind::BF16)
                if (words) {
                    const float* const of_rows = sums() + done * (matrix.columns / matrix.group);
                    const uint16_t* const x = (const uint16_t*)memory + done * matrix.columns;
                    return multiply_words<KIND, R>(matrix, first, end, x, of_rows, out + done * stride, stride);
                }
#elif MOEDGE_LEVEL == 1
            if constexpr (is_nibbles(KIND))
                if (words) return multiply_words<KIND, R>(matrix, first, end, memory + done * BLOCK, rows, out + done * stride, stride);
#endif
            multiply<KIND, GROUPED, R>(matrix, first, end, memory + done * CHUNK, rows, out + done * stride, stride);
        });
    }

    // Products of all rows with matrix rows `first` to `end`: out[r * stride + n - first].
    void multiply_any(int64_t first, int64_t end, float* out, int64_t stride) const {
        switch (matrix.kind) {
            case Kind::INT4: return multiply_by<Kind::INT4, true>(first, end, out, stride);
            case Kind::NF4: return multiply_by<Kind::NF4, true>(first, end, out, stride);
            case Kind::E2M1: return multiply_by<Kind::E2M1, true>(first, end, out, stride);
            case Kind::INT8:
                if (matrix.group < matrix.columns) return multiply_by<Kind::INT8, true>(first, end, out, stride);
                return multiply_by<Kind::INT8, false>(first, end, out, stride);
            case Kind::BF16: return multiply_by<Kind::BF16, false>(first, end, out, stride);
            case Kind::FP16: return multiply_by<Kind::FP16, false>(first, end, out, stride);
            case Kind::FP32: return multiply_by<Kind::FP32, false>(first, end, out, stride);
        }
    }
};

inline float float_at(Format format, const void* from, int64_t at) {
    return number_at(format == Format::MOEDGE_FP32 ? Scales::FLOAT32 : format == Format::MOEDGE_FP16 ? Scales::FLOAT16 : Scales::BFLOAT16,
                     (const uint8_t*)from, at);
}

// One job: its matrices, and the inputs of both.
struct RowJob {
    const moedge_row_job& job;
    RowMatrix up, down;
    RowInputs inputs, inner;

    RowJob(const moedge_row_job& given, float* scratch, Format format)
        : job(given), up(given.up), down(given.down), inputs(up, format, scratch + given.scratch_offset, given.rows),
          inner(down, format, scratch + given.scratch_offset + given.rows * up.columns, given.rows) {}
};

struct RowExperts : moedge_row_mixture {
    explicit RowExperts(const moedge_row_mixture& mixture) : moedge_row_mixture(mixture) {}

    RowJob job(int64_t index) const { return RowJob(jobs[index], scratch, format); }

    void gather(const RowJob& job) const {
        for (int64_t r = 0; r < job.job.rows; r++) {
            const int64_t first = token_ids[job.job.first_row + r] * hidden_stride;
            for (int64_t c = 0; c < job.up.columns; c += CHUNK) {
                float numbers[CHUNK];
                if (format == Format::MOEDGE_BF16)
#pragma GCC unroll 8
                    for (int v = 0; v < PER_CHUNK; v++) store(numbers + v * W, from_bf16((const uint16_t*)hidden + first + c + v * W));
                else
                    for (int i = 0; i < CHUNK; i++) numbers[i] = float_at(format, hidden, first + c + i);
                job.inputs.put_chunk(numbers, r, c / CHUNK);
            }
        }
    }

    // The numbers of all rows that are a chunk of the second matrix's inputs.
    void activate(const RowJob& job, int64_t chunk) const {
        alignas(64) float results[MOEDGE_FEW_ROWS * 2 * CHUNK];
        const int64_t half = job.up.rows / 2, first = chunk * CHUNK;
        const int64_t begins[] = {alternating ? 2 * first : first, alternating ? 2 * first + CHUNK : half + first};
        for (int part = 0; part < 2; part++)
            job.inputs.multiply_any(begins[part], begins[part] + CHUNK, results + part * CHUNK, 2 * CHUNK);
        for (int64_t r = 0; r < job.job.rows; r++) {
            float* numbers = results + r * 2 * CHUNK;
            if (job.job.up_bias != nullptr)
                for (int i = 0; i < 2 * CHUNK; i++) numbers[i] += float_at(format, job.job.up_bias, begins[i / CHUNK] + i % CHUNK);
            float gates[CHUNK], ups[CHUNK];
            for (int i = 0; i < CHUNK; i++) {
                gates[i] = numbers[alternating ? 2 * i : i];
                ups[i] = numbers[alternating ? 2 * i + 1 : CHUNK + i];
            }
            for (int i = 0; i < CHUNK; i += W) store(gates + i, gated(activation, load(gates + i), load(ups + i)));
            job.inner.put_chunk(gates, r, chunk);
        }
    }

    void multiply_down(const RowJob& job, int64_t first) const {
        alignas(64) float results[MOEDGE_FEW_ROWS * ITEM_ROWS];
        const int64_t end = first + ITEM_ROWS < job.down.rows ? first + ITEM_ROWS : job.down.rows;
        job.inner.multiply_any(first, end, results, ITEM_ROWS);
        const void* const bias = job.job.down_bias;
        for (int64_t r = 0; r < job.job.rows; r++)
            for (int64_t n = first; n < end; n++) {
                const float result = results[r * ITEM_ROWS + n - first] + (bias != nullptr ? float_at(format, bias, n) : 0.0f);
                const int64_t at = (job.job.first_row + r) * out_stride + n;
                if (format == Format::MOEDGE_FP32) ((float*)out)[at] = result;
                else ((uint16_t*)out)[at] = format == Format::MOEDGE_BF16 ? float_to_bf16(result) : float_to_half(result);
            }
    }
};

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_row_experts)(const moedge_row_mixture* mixture) {
    const RowExperts experts(*mixture);
    const Work work = {experts.counters};
    const int64_t jobs = experts.num_jobs;
    if (jobs == 0) return;
    // A group whose sum is kept is one item.
    const RowMatrix down(experts.jobs[0].down);
    const int64_t chunks = down.columns / CHUNK, together = is_nibbles(down.kind) ? down.group / CHUNK : 1;
    const int64_t parts = chunks / together, pieces = ceil_of(down.rows, ITEM_ROWS), activated = jobs + jobs * parts;
    for (int64_t item; (item = work.take()) < activated + jobs * pieces; work.finish()) {
        if (item < jobs) {
            experts.gather(experts.job(item));
        } else if (item < activated) {
            work.wait(jobs);
            const RowJob job = experts.job((item - jobs) / parts);
            for (int64_t i = 0; i < together; i++) experts.activate(job, (item - jobs) % parts * together + i);
        } else {
            work.wait(activated);
            experts.multiply_down(experts.job((item - activated) / pieces), (item - activated) % pieces * ITEM_ROWS);
        }
    }
}
