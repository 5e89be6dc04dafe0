// Quantizes matrices, and widens them, without Python and torch, for sanitizers: random shapes and numbers against loops
// over single numbers, in memory of exactly the size that the interface asks for, and one thread against three.
//
//     packing CASES [SEED]     exits with 1 and names the first case that is wrong
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "moedge_cpu.h"

// What moedge_widen calls on processors without SSSE3.
extern "C" void moedge_widen_portable(const moedge_widening *widening);

namespace {

using Random = std::mt19937;

enum { NF4 = int(moedge_weight_format::NF4), INT4 = int(moedge_weight_format::INT4), MXFP4 = int(moedge_weight_format::MXFP4),
       INT8 = int(moedge_weight_format::INT8) };
enum { ROWS = int(moedge_order::ROWS), TILES = int(moedge_order::TILES) };

float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A group of numbers, packed one at a time: codes, and the bytes that are stored beside them.
struct Group {
    std::vector<int> codes;
    std::vector<uint8_t> scale;

    template <class Number>
    void store(Number number) {
        const uint8_t *bytes = (const uint8_t *)&number;
        scale.insert(scale.end(), bytes, bytes + sizeof(Number));
    }

    Group(int format, const std::vector<float> &numbers, float factor) {
        float low = numbers[0], high = numbers[0], most = 0;
        for (float each : numbers) {
            low = std::min(low, each);
            high = std::max(high, each);
            most = std::max(most, fabsf(each));
        }
        if (format == NF4) nf4(numbers, most);
        if (format == INT4) int4(numbers, low, high, factor);
        if (format == MXFP4) mxfp4(numbers, most);
        if (format == INT8) int8(numbers, most);
    }

    void nf4(const std::vector<float> &numbers, float most) {
        const double levels[] = {
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0};
        store(to_bf16(most));
        const float factor = 1.0f / std::max(most, 1e-38f);
        for (float each : numbers) {
            int code = 0;
            for (int i = 0; i < 15; i++) code += each * factor > float((levels[i] + levels[i + 1]) / 2);
            codes.push_back(code);
        }
    }

    void int4(const std::vector<float> &numbers, float low, float high, float factor) {
        low = std::min(low, 0.0f);
        const float exact = std::max(high, 0.0f) / 15 - low / 15;
        const float scale = std::min(std::max(ceilf(exact / factor), 1.0f), 255.0f), step = scale * factor;
        const float zero = nearbyintf(-low / step * 16);
        store(uint8_t(scale));
        store(uint8_t(zero));
        for (float each : numbers)
            codes.push_back(int(std::min(std::max(nearbyintf(each / step + zero / 16), 0.0f), 15.0f)));
    }

    void mxfp4(const std::vector<float> &numbers, float most) {
        int exponent;
        frexpf(most, &exponent);
        const int biased = most > 0 ? std::max(exponent - 3 + 127, 0) : 0;
        store(uint8_t(biased));
        for (float each : numbers) {
            const double scaled = ldexp(each, 127 - biased);
            int code = 0;
            for (double midpoint : {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0}) code += fabs(scaled) > midpoint;
            codes.push_back(code && scaled < 0 ? code + 8 : code);
        }
    }

    void int8(const std::vector<float> &numbers, float most) {
        const float step = std::max(most, 1e-30f) / 127;
        store(step);
        for (float each : numbers) codes.push_back(int(std::min(std::max(nearbyintf(each / step), -127.0f), 127.0f)));
    }
};

struct Case {
    int format, order;
    int64_t rows, columns, stride, group, block;
    std::vector<uint16_t> x;
    std::vector<uint8_t> codes, scales;
    std::vector<float> factors;

    explicit Case(Random &random) : format(int(random() % 4)) {
        order = format == INT8 ? ROWS : int(random() % 2);
        group = format == NF4 ? 64 : 32;
        columns = format == INT8 ? 1 + random() % 200 : group * (1 + random() % 11);
        if (format == INT8) group = columns;
        block = order == ROWS ? 1 : 32;
        rows = order == TILES ? block * (1 + random() % 4) : 1 + random() % 140;
        stride = columns + random() % 3;
        x.resize(size_t((rows - 1) * stride + columns));
        const int kind = int(random() % 3);
        for (auto &each : x) {
            each = kind == 0 ? uint16_t(random()) : to_bf16(std::normal_distribution<float>()(random));
            if (kind == 1) each = to_bf16(float(int(random() % 512) - 256) / 1024);
            if ((each & 0x7fff) > 0x7f7f) each = 0;
        }
        codes.resize(size_t(rows * columns / (format == INT8 ? 1 : 2)));
        scales.resize(size_t(rows * (columns / group)) * scale_nbytes());
        factors.resize(size_t(format == INT4 ? rows : 0));
    }

    size_t scale_nbytes() const { return format == INT8 ? 4 : format == MXFP4 ? 1 : 2; }

    size_t scale_at(int64_t row, int64_t number) const {
        const int64_t groups = columns / group;
        const int64_t at = order == TILES ? (row / 32 * groups + number) * 32 + row % 32 : row * groups + number;
        return size_t(at) * scale_nbytes();
    }

    int code_at(int64_t row, int64_t column) const {
        if (format == INT8) return int8_t(codes[size_t(row * columns + column)]);
        const int64_t half = block / 2, in = block > 1 ? row % half : 0, tile = row / block * block * columns / 2;
        const int64_t at = order == TILES ? tile + column / 2 * 32 + 2 * in + column % 2 : (row * columns + column) / 2;
        const bool high = order == ROWS ? (column % 2 == 0) == (format == NF4) : row % block >= half;
        return high ? codes[size_t(at)] >> 4 : codes[size_t(at)] & 15;
    }

    // Whether all numbers were finite.
    bool run(int threads) {
        std::fill(codes.begin(), codes.end(), 0xab);
        std::fill(scales.begin(), scales.end(), 0xab);
        std::fill(factors.begin(), factors.end(), 7.0f);
        const int64_t blocks = rows / block;
        std::vector<moedge_packing> parts;
        for (int i = 0; i < threads; i++) {
            const int64_t first = blocks * i / threads * block, end = blocks * (i + 1) / threads * block;
            if (first < end)
                parts.push_back({x.data() + first * stride, stride, end - first, columns,
                                 codes.data() + first * columns / (format == INT8 ? 1 : 2), scales.data() + scale_at(first, 0),
                                 format == INT4 ? factors.data() + first : nullptr, nullptr, moedge_weight_format(format),
                                 moedge_order(order), 7});
        }
        std::vector<std::thread> running;
        for (auto &each : parts) running.emplace_back(moedge_pack, &each);
        for (auto &each : running) each.join();
        return std::all_of(parts.begin(), parts.end(), [](const moedge_packing &each) { return each.finite == 1; });
    }

    bool right() const {
        for (int64_t row = 0; row < rows; row++) {
            const float factor = format == INT4 ? factor_of(row) : 0;
            if (format == INT4 && factors[size_t(row)] != factor) return false;
            for (int64_t number = 0; number < columns / group; number++) {
                const Group wanted(format, numbers(row, number), factor);
                if (memcmp(wanted.scale.data(), scales.data() + scale_at(row, number), wanted.scale.size())) return false;
                for (int64_t i = 0; i < group; i++)
                    if (wanted.codes[size_t(i)] != code_at(row, number * group + i)) return false;
            }
        }
        return true;
    }

    float factor_of(int64_t row) const {
        float most = 0;
        for (int64_t number = 0; number < columns / group; number++) {
            float low = 0, high = 0;
            for (float each : numbers(row, number)) low = std::min(low, each), high = std::max(high, each);
            most = std::max(most, high / 15 - low / 15);
        }
        return std::max(most / 255, 1e-36f);
    }

    std::vector<float> numbers(int64_t row, int64_t number) const {
        std::vector<float> made;
        for (int64_t i = 0; i < group; i++)
            made.push_back(from_bf16(x[size_t(row * stride + number * group + i)]));
        return made;
    }
};

// Rows of MXFP4 that lie apart, with any codes and scales.
struct Widening {
    int64_t rows, columns, apart;
    std::vector<uint8_t> codes, scales;
    std::vector<uint16_t> out;

    explicit Widening(Random &random) : rows(1 + random() % 40), columns(32 * (1 + random() % 11)), apart(random() % 3) {
        codes.resize(size_t((rows - 1) * code_stride() + columns / 2));
        scales.resize(size_t((rows - 1) * scale_stride() + columns / 32));
        const int least = int(random() % 2 ? 0 : 118), range = least ? 12 : 256;
        for (auto &each : codes) each = uint8_t(random());
        for (auto &each : scales) each = uint8_t(least + int(random() % unsigned(range)));
        out.resize(size_t(rows * columns));
    }

    int64_t code_stride() const { return columns / 2 + 16 * apart; }
    int64_t scale_stride() const { return columns / 32 + apart; }

    void run(void (*widen)(const moedge_widening *), int threads) {
        std::fill(out.begin(), out.end(), 0xabab);
        std::vector<moedge_widening> parts;
        for (int i = 0; i < threads; i++) {
            const int64_t first = rows * i / threads, end = rows * (i + 1) / threads;
            if (first < end)
                parts.push_back({codes.data() + first * code_stride(), code_stride(), scales.data() + first * scale_stride(),
                                 scale_stride(), out.data() + first * columns, end - first, columns});
        }
        std::vector<std::thread> running;
        for (auto &each : parts) running.emplace_back(widen, &each);
        for (auto &each : running) each.join();
    }

    bool right() const {
        const double levels[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < columns; column++) {
                const int scale = scales[size_t(row * scale_stride() + column / 32)];
                const int code = codes[size_t(row * code_stride() + column / 2)] >> (column % 2 * 4) & 15;
                const double number = ldexp(code & 8 ? -levels[code & 7] : levels[code & 7], scale - 127);
                const uint16_t wanted = scale == 255             ? 0x7fc0
                                        : fabs(number) >= 0x1p128 ? uint16_t(code & 8 ? 0xff80 : 0x7f80)
                                                                 : to_bf16(float(number));
                if (out[size_t(row * columns + column)] != wanted) return false;
            }
        return true;
    }
};

bool widens(Random &random) {
    Widening one(random);
    for (const auto widen : {moedge_widen, moedge_widen_portable})
        for (int threads : {1, 3}) {
            one.run(widen, threads);
            if (!one.right()) return false;
        }
    // Another code is seen, wherever the scale does not hide it.
    const size_t byte = random() % size_t(one.columns / 2);
    one.codes[byte] ^= 0x22;
    return one.scales[byte / 16] > 250 || !one.right();
}

bool passes(Random &random) {
    Case one(random);
    if (!one.run(1) || !one.right()) return false;
    const Case alone = one;
    if (!one.run(3) || one.codes != alone.codes || one.scales != alone.scales || one.factors != alone.factors) return false;
    const uint16_t bad[] = {0x7f80, 0xff80, 0x7fc0, 0xffc1};
    one.x[size_t(random() % one.rows * one.stride + random() % one.columns)] = bad[random() % 4];
    return !one.run(1) && !one.run(3);
}

}  // namespace

int main(int count, char **arguments) {
    const int cases = count > 1 ? atoi(arguments[1]) : 20, seed = count > 2 ? atoi(arguments[2]) : 0;
    for (int set = MOEDGE_NONE; set <= moedge_supported(); set++) {
        moedge_choose(set);
        for (int number = 0; number < cases; number++) {
            Random random(uint32_t(seed + number));
            // Only widening has code for processors without AVX2.
            if (widens(random) && (set == MOEDGE_NONE || passes(random))) continue;
            printf("set %d, seed %d is wrong\n", set, seed + number);
            return 1;
        }
    }
    printf("%d cases of %d instruction sets\n", cases, moedge_supported());
    return 0;
}
