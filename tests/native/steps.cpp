// Calls the steps of a decoder layer without Python and torch, for sanitizers: the same layer by one thread and by three,
// in memory of exactly the size that the interface asks for.
//
//     steps CASES [SEED]     exits with 1 and names the first case that differs
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
using Arguments = std::vector<int64_t>;

enum { MULTIPLY, EXPERTS, NORM, HEADS, ROUTER, CHOOSE, GROUP, COMBINE };
enum { COUNTERS = 32 };

Numbers random_numbers(Random &random, int64_t count, float scale) {
    Numbers made;
    for (int64_t i = 0; i < count; i++) {
        const float value = scale * std::normal_distribution<float>()(random);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        made.push_back(uint16_t(bits >> 16));
    }
    return made;
}

template <class T>
int64_t at(const std::vector<T> &memory) {
    return int64_t(memory.data());
}

// A matrix of 4-bit integers with pairs of scale and zero for 32 columns.
struct Matrix {
    int64_t rows, columns;
    std::vector<uint8_t> codes;
    Numbers scales;

    Matrix(Random &random, int64_t rows_, int64_t columns_)
        : rows(rows_), columns(columns_), codes(size_t(rows_ * columns_ / 2)),
          scales(random_numbers(random, 2 * rows_ * columns_ / 32, 0.02f)) {
        for (auto &each : codes) each = uint8_t(random());
    }

    void describe(Arguments &given) const {
        for (int64_t each : {int64_t(0), at(codes), at(scales), int64_t(0), rows, columns, int64_t(32), int64_t(0), int64_t(4)})
            given.push_back(each);
    }
};

int64_t row_nbytes(int64_t columns) { return 2 * columns + columns / 8; }

int64_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

struct Layer {
    int64_t rows, dim, kv_heads, width, inner, experts, chosen;
    Matrix q, k, v, o;
    std::vector<Matrix> ups, downs;
    Numbers hidden, norm, head_norm, router, cos, sin;

    explicit Layer(Random &random)
        : rows(random() % 5 ? 1 + random() % 20 : 120 + random() % 200), dim(32 << random() % 2), kv_heads(1 + random() % 2), width(32 * (1 + random() % 3)),
          inner(32 * (1 + random() % 2)), experts(2 + random() % 7), chosen(1 + random() % 2),
          q(random, 2 * kv_heads * dim, width), k(random, kv_heads * dim, width), v(random, kv_heads * dim, width),
          o(random, width, 2 * kv_heads * dim), hidden(random_numbers(random, rows * width, 1)),
          norm(random_numbers(random, width, 1)), head_norm(random_numbers(random, dim, 1)),
          router(random_numbers(random, experts * width, 1)), cos(random_numbers(random, rows * dim, 1)),
          sin(random_numbers(random, rows * dim, 1)) {
        for (int64_t e = 0; e < experts; e++) {
            ups.emplace_back(random, 2 * inner, width);
            downs.emplace_back(random, width, inner);
        }
    }

    Arguments multiply(const Matrix &matrix, const Numbers &x, Numbers &y, std::vector<char> &scratch, int64_t counters) const {
        scratch.resize(size_t(rows * row_nbytes(matrix.columns)));
        Arguments given = {at(x), matrix.columns, at(y), matrix.rows, rows, at(scratch), counters};
        matrix.describe(given);
        return given;
    }

    // The layer's result, with queries in place of what attention would give.
    Numbers result(int threads) const {
        constexpr int64_t STEPS = 12;
        std::vector<int64_t> counters(COUNTERS * (STEPS + 1));
        const auto own = [&](int64_t step) { return int64_t(counters.data() + COUNTERS * (step + 1)); };
        Numbers normed(hidden.size()), total(hidden.size()), projected(hidden.size()), out(hidden.size());
        Numbers qs(size_t(rows * q.rows)), ks(size_t(rows * k.rows)), vs(size_t(rows * v.rows));
        const int64_t block = 4, blocks = (rows + block - 1) / block;
        Numbers keys(size_t(blocks * block * k.rows)), values(keys.size()), outputs(size_t(rows * chosen * width));
        Arguments slots, table, ids(size_t(rows * chosen)), counts(size_t(experts), 0), token_ids(ids.size()), assignment_rows(ids.size());
        for (int64_t r = 0; r < rows; r++) slots.push_back(rows - 1 - r);
        std::vector<float> logits(size_t(rows * experts)), weights(ids.size());
        std::vector<char> packed[4], scratch(ids.size() * size_t(row_nbytes(width) + row_nbytes(inner)));
        for (int64_t e = 0; e < experts; e++) {
            ups[size_t(e)].describe(table);
            downs[size_t(e)].describe(table);
        }
        Arguments mixture(size_t(11 + (experts + rows * chosen / MOEDGE_MOST_ROWS) * 21), 0);
        const int64_t jobs = int64_t(mixture.data() + 11);
        const Arguments fixed = {at(normed), width, at(token_ids), at(outputs), width, at(scratch), 0, 0, 0, jobs, own(10)};
        std::copy(fixed.begin(), fixed.end(), mixture.begin());
        const std::vector<Arguments> all = {
            {at(hidden), 0, at(norm), 0, at(normed), bits_of(1e-5f), 0, rows, width},
            multiply(q, normed, qs, packed[0], own(1)),
            multiply(k, normed, ks, packed[1], own(2)),
            multiply(v, normed, vs, packed[2], own(3)),
            {rows, dim, dim, at(cos), at(sin), at(qs), 2 * kv_heads, at(head_norm), bits_of(1e-6f), 1, at(ks), kv_heads, 0, 0, 0,
             1, at(ks), at(vs), at(keys), at(values), at(slots), kv_heads, dim, block},
            multiply(o, qs, projected, packed[3], own(5)),
            {at(hidden), at(projected), at(norm), at(total), at(normed), bits_of(1e-5f), 1, rows, width},
            {at(normed), at(router), at(logits), rows, width, experts},
            {at(logits), at(ids), at(weights), rows, experts, chosen, 1},
            {at(ids), at(table), at(counts), at(token_ids), at(assignment_rows), at(mixture), jobs, rows, chosen, experts,
             row_nbytes(width) + row_nbytes(inner)},
            {},
            {at(outputs), at(total), at(assignment_rows), at(weights), at(out), rows, chosen, width},
        };
        const int64_t kinds[STEPS] = {NORM, MULTIPLY, MULTIPLY, MULTIPLY, HEADS, MULTIPLY, NORM, ROUTER, CHOOSE, GROUP, EXPERTS, COMBINE};
        Arguments given = {STEPS, int64_t(counters.data()), int64_t(counters.data() + COUNTERS)};
        for (int64_t s = 0; s < STEPS; s++)
            for (int64_t each : {kinds[s], kinds[s] == EXPERTS ? at(mixture) : at(all[size_t(s)]), int64_t(s != 1 && s != 2)})
                given.push_back(each);
        std::vector<std::thread> others;
        for (int i = 1; i < threads; i++) others.emplace_back(moedge_steps, given.data());
        moedge_steps(given.data());
        for (auto &each : others) each.join();
        out.insert(out.end(), keys.begin(), keys.end());
        return out;
    }
};

}  // namespace

int main(int count, char **arguments) {
    const int cases = count > 1 ? atoi(arguments[1]) : 20, seed = count > 2 ? atoi(arguments[2]) : 0;
    for (int set = MOEDGE_AVX2; set <= moedge_supported(); set++) {
        moedge_choose(set);
        for (int number = 0; number < cases; number++) {
            Random random(uint32_t(seed + number));
            const Layer layer(random);
            if (layer.result(1) == layer.result(3)) continue;
            printf("set %d, seed %d differs\n", set, seed + number);
            return 1;
        }
    }
    printf("%d cases of %d instruction sets\n", cases, moedge_supported());
    return 0;
}
