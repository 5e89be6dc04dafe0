// Calls the products with matrices in order `tiles` without Python and torch, for sanitizers: random shapes against sums
// in double, in memory of exactly the size that the interface asks for, and one thread against three.
//
//     products CASES [SEED]     exits with 1 and names the first case that is wrong
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <thread>
#include <vector>

#include "moedge_cpu.h"

namespace {

using Random = std::mt19937;
using Numbers = std::vector<uint16_t>;

float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

Numbers random_numbers(Random &random, size_t count, float scale) {
    Numbers made(count);
    for (auto &each : made) {
        const float value = scale * std::normal_distribution<float>()(random);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        each = uint16_t(bits >> 16);
    }
    return made;
}

// How matrices are multiplied: int4 with scales and zeros of a byte each, or int8 with scales, inputs rounded to integers or not.
struct Kind {
    bool int8, integers;

    explicit Kind(Random &random) : int8(random() % 3 == 0), integers(random() % 2 == 0) {}
};

// A matrix, and its bias.
struct Matrix {
    Kind kind;
    int64_t rows, columns, group;
    std::vector<uint8_t> codes, pairs;
    std::vector<float> factors;
    Numbers scales, bias;

    Matrix(Random &random, Kind kind_, int64_t rows_, int64_t columns_, int64_t group_)
        : kind(kind_), rows(rows_), columns(columns_), group(group_), codes(size_t(rows_ * columns_ / (kind_.int8 ? 1 : 2))),
          pairs(size_t(kind_.int8 ? 0 : 2 * rows_ * columns_ / group_)), factors(size_t(kind_.int8 ? 0 : rows_)),
          scales(random_numbers(random, size_t(kind_.int8 ? rows_ * columns_ / group_ : 0), 0.1f)),
          bias(random() % 2 ? random_numbers(random, size_t(rows_), 1) : Numbers()) {
        for (auto &each : codes) each = uint8_t(random());
        // Zeros about the middle of the codes: others make results small beside what is summed.
        for (size_t i = 0; i < pairs.size(); i++) pairs[i] = uint8_t(i % 2 ? 96 + random() % 64 : random());
        for (auto &each : factors) each = float(50 + random() % 100) / 100000;
    }

    moedge_matrix native() const {
        return {codes.data(), kind.int8 ? (const uint8_t *)scales.data() : pairs.data(), nullptr,
                kind.int8 ? nullptr : factors.data(), rows, columns, group,
                kind.int8 ? moedge_codes::INT8 : moedge_codes::INT4,
                kind.int8 ? moedge_scales::BFLOAT16 : moedge_scales::PAIRS};
    }

    const uint16_t *bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }

    double weight(int64_t row, int64_t column) const {
        const int64_t tile = row / 32, i = row % 32;
        const size_t item = size_t((tile * (columns / group) + column / group) * 32 + i);
        if (kind.int8) {
            const uint8_t code = codes[size_t(tile * 32 * columns + column / 2 * 64 + 2 * i + column % 2)];
            return int8_t(code) * double(from_bf16(scales[item]));
        }
        const uint8_t both = codes[size_t(tile * 16 * columns + column / 2 * 32 + 2 * (i % 16) + column % 2)];
        const int code = i < 16 ? both & 15 : both >> 4;
        return (code - pairs[2 * item + 1] / 16.0) * pairs[2 * item] * double(factors[size_t(row)]);
    }

    std::vector<double> product(const std::vector<double> &x) const {
        std::vector<double> y(size_t(rows), 0);
        for (int64_t n = 0; n < rows; n++) {
            for (int64_t k = 0; k < columns; k++) y[size_t(n)] += x[size_t(k)] * weight(n, k);
            if (!bias.empty()) y[size_t(n)] += from_bf16(bias[size_t(n)]);
        }
        return y;
    }
};

size_t row_nbytes(int64_t columns) { return size_t(2 * columns + columns / 8); }

// Calls `kernel` on threads.
template <class Arguments>
void run(void (*kernel)(const Arguments *), Arguments arguments, int threads) {
    int64_t counters[MOEDGE_COUNTERS] = {};
    arguments.counters = counters;
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(kernel, &arguments);
    kernel(&arguments);
    for (auto &each : others) each.join();
}

std::vector<double> row_of(const Numbers &x, int64_t row, int64_t columns) {
    std::vector<double> made;
    for (int64_t k = 0; k < columns; k++) made.push_back(from_bf16(x[size_t(row * columns + k)]));
    return made;
}

struct Error {
    double difference = 0, whole = 0;

    void add(const std::vector<double> &exact, const uint16_t *found) {
        for (size_t i = 0; i < exact.size(); i++) {
            difference += (exact[i] - from_bf16(found[i])) * (exact[i] - from_bf16(found[i]));
            whole += exact[i] * exact[i];
        }
    }

    bool small(Kind kind) const { return difference <= (kind.integers ? 4e-4 : 1e-4) * whole; }
};

bool one_matrix(Random &random) {
    const int64_t group = 32 << random() % 3, rows = 1 + random() % 130;
    const Kind kind(random);
    const Matrix matrix(random, kind, 32 * (1 + random() % 4), group * (1 + random() % 4), group);
    const Numbers x = random_numbers(random, size_t(rows * matrix.columns), 1);
    Numbers found[2];
    for (int turn = 0; turn < 2; turn++) {
        found[turn].resize(size_t(rows * matrix.rows));
        std::vector<char> scratch(size_t(rows) * row_nbytes(matrix.columns));
        run(moedge_multiply,
            {x.data(), matrix.columns, found[turn].data(), matrix.rows, rows, scratch.data(), nullptr, matrix.native(),
             matrix.bias_or_null(), kind.integers},
            turn ? 3 : 1);
    }
    // In memory of its own size: nothing is written beside it.
    Numbers wide(size_t(matrix.rows * matrix.columns));
    const moedge_tiles_widening widening = {matrix.native(), wide.data()};
    moedge_widen_tiles(&widening);
    for (int64_t n = 0; n < matrix.rows; n += 5)
        for (int64_t k = 0; k < matrix.columns; k++) {
            const double exact = matrix.weight(n, k), made = from_bf16(wide[size_t(n * matrix.columns + k)]);
            if (fabs(made - exact) > fabs(exact) / 250 + 1e-6) return false;
        }
    Error error;
    for (int64_t r = 0; r < rows; r += 7)
        error.add(matrix.product(row_of(x, r, matrix.columns)), found[0].data() + r * matrix.rows);
    return error.small(kind) && found[0] == found[1];
}

bool experts(Random &random) {
    const int64_t width = 32 * (1 + random() % 4), inner = 32 * (1 + random() % 3), count = 1 + random() % 4, tokens = 9;
    const Kind kind(random);
    std::vector<Matrix> ups, downs;
    std::vector<int64_t> rows, token_ids;
    std::vector<moedge_job> jobs;
    for (int64_t e = 0; e < count; e++) {
        ups.emplace_back(random, kind, 2 * inner, width, 32);
        downs.emplace_back(random, kind, width, inner, 32);
        rows.push_back(1 + random() % 40);
    }
    int64_t first = 0;
    const size_t nbytes = row_nbytes(width) + row_nbytes(inner);
    for (int64_t e = 0; e < count; e++) {
        const Matrix &up = ups[size_t(e)], &down = downs[size_t(e)];
        jobs.push_back({first, rows[size_t(e)], int64_t(size_t(first) * nbytes),
                        {up.native(), down.native(), up.bias_or_null(), down.bias_or_null()}});
        first += rows[size_t(e)];
    }
    for (int64_t r = 0; r < first; r++) token_ids.push_back(random() % tokens);
    const Numbers hidden = random_numbers(random, size_t(tokens * width), 1);
    Numbers found[2];
    for (int turn = 0; turn < 2; turn++) {
        found[turn].resize(size_t(first * width));
        std::vector<char> scratch(size_t(first) * nbytes);
        run(moedge_experts,
            {hidden.data(), width, token_ids.data(), found[turn].data(), width, scratch.data(), count, jobs.data(), nullptr,
             moedge_activation::SILU, 0, kind.integers},
            turn ? 3 : 1);
    }
    Error error;
    for (int64_t e = 0, r = 0; e < count; r += rows[size_t(e)], e++) {
        const std::vector<double> both = ups[size_t(e)].product(row_of(hidden, token_ids[size_t(r)], width));
        std::vector<double> activated;
        for (size_t i = 0; i < size_t(inner); i++)
            activated.push_back(both[i] / (1 + exp(-both[i])) * both[i + size_t(inner)]);
        error.add(downs[size_t(e)].product(activated), found[0].data() + r * width);
    }
    return error.small(kind) && found[0] == found[1];
}

}  // namespace

int main(int count, char **arguments) {
    const int cases = count > 1 ? atoi(arguments[1]) : 20, seed = count > 2 ? atoi(arguments[2]) : 0;
    for (int set = MOEDGE_AVX2; set <= moedge_supported(); set++) {
        moedge_choose(set);
        for (int number = 0; number < cases; number++) {
            Random random(uint32_t(seed + number));
            if (number % 2 ? experts(random) : one_matrix(random)) continue;
            printf("set %d, seed %d is wrong\n", set, seed + number);
            return 1;
        }
    }
    printf("%d cases of %d instruction sets\n", cases, moedge_supported());
    return 0;
}
