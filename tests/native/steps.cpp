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

    moedge_matrix native() const {
        return {codes.data(), (const uint8_t *)scales.data(), nullptr, rows, columns, 32, moedge_codes::INT4, moedge_scales::PAIRS};
    }
};

int64_t row_nbytes(int64_t columns) { return 2 * columns + columns / 8; }

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

    moedge_product product(const Matrix &matrix, const Numbers &x, Numbers &y, std::vector<char> &scratch, int64_t *counters) const {
        scratch.resize(size_t(rows * row_nbytes(matrix.columns)));
        return {x.data(), matrix.columns, y.data(), matrix.rows, rows, scratch.data(), counters, matrix.native(), nullptr, 0};
    }

    // The layer's result, with queries in place of what attention would give.
    Numbers result(int threads) const {
        constexpr int64_t STEPS = 13;
        std::vector<int64_t> counters(MOEDGE_STEP_COUNTERS * (STEPS + 1));
        const auto own = [&](int64_t step) { return counters.data() + MOEDGE_STEP_COUNTERS * (step + 1); };
        Numbers normed(hidden.size()), total(hidden.size()), projected(hidden.size()), out(hidden.size());
        Numbers qs(size_t(rows * q.rows)), ks(size_t(rows * k.rows)), vs(size_t(rows * v.rows));
        const int64_t block = 4, blocks = (rows + block - 1) / block;
        Numbers keys(size_t(blocks * block * k.rows)), values(keys.size()), outputs(size_t(rows * chosen * width));
        std::vector<int64_t> slots, ids(size_t(rows * chosen)), counts(size_t(experts), 0), token_ids(ids.size()), assignment_rows(ids.size());
        for (int64_t r = 0; r < rows; r++) slots.push_back(rows - 1 - r);
        std::vector<float> logits(size_t(rows * experts)), weights(ids.size());
        std::vector<char> packed[4], scratch(ids.size() * size_t(row_nbytes(width) + row_nbytes(inner)));
        std::vector<moedge_expert> table;
        for (size_t e = 0; e < ups.size(); e++) table.push_back({ups[e].native(), downs[e].native(), nullptr, nullptr});
        std::vector<moedge_job> jobs(size_t(experts + rows * chosen / MOEDGE_MOST_ROWS));
        moedge_norm first = {hidden.data(), nullptr, norm.data(), nullptr, normed.data(), rows, width, 1e-5f, 0};
        moedge_product products[] = {product(q, normed, qs, packed[0], own(1)), product(k, normed, ks, packed[1], own(2)),
                                     product(v, normed, vs, packed[2], own(3)), product(o, qs, projected, packed[3], own(6))};
        // As between the matrices of a dense layer, though another one gives its second input.
        const Numbers other(qs.size(), hidden[0]);
        moedge_gating gating = {qs.data(), other.data(), rows, q.rows, moedge_activation::GELU_TANH};
        moedge_heads heads = {rows, dim, dim, cos.data(), sin.data(), {qs.data(), head_norm.data(), 2 * kv_heads, 1e-6f, 1},
                              {ks.data(), nullptr, kv_heads, 0, 0}, vs.data(), keys.data(), values.data(), slots.data(), block};
        moedge_norm second = {hidden.data(), projected.data(), norm.data(), total.data(), normed.data(), rows, width, 1e-5f, 1};
        moedge_router scores = {normed.data(), router.data(), logits.data(), rows, width, experts};
        moedge_choice choice = {logits.data(), ids.data(), weights.data(), rows, experts, chosen, 1};
        moedge_mixture mixture = {normed.data(), width, token_ids.data(), outputs.data(), width, scratch.data(), 0, jobs.data(),
                                  own(11), moedge_activation::SILU, 0, 0};
        moedge_grouping grouping = {ids.data(), table.data(), counts.data(), token_ids.data(), assignment_rows.data(), &mixture,
                                    rows, chosen, experts, row_nbytes(width) + row_nbytes(inner)};
        moedge_combination combination = {outputs.data(), total.data(), assignment_rows.data(), weights.data(), out.data(), rows,
                                          chosen, width};
        using Kind = moedge_kind;
        const moedge_step steps[STEPS] = {
            {Kind::NORM, 1, &first},          {Kind::MULTIPLY, 0, &products[0]}, {Kind::MULTIPLY, 0, &products[1]},
            {Kind::MULTIPLY, 1, &products[2]}, {Kind::HEADS, 1, &heads},          {Kind::GATE, 1, &gating},
            {Kind::MULTIPLY, 1, &products[3]},
            {Kind::NORM, 1, &second},         {Kind::ROUTER, 1, &scores},        {Kind::CHOOSE, 1, &choice},
            {Kind::GROUP, 1, &grouping},      {Kind::EXPERTS, 1, &mixture},      {Kind::COMBINE, 1, &combination},
        };
        const moedge_run run = {STEPS, steps, counters.data(), own(0)};
        std::vector<std::thread> others;
        for (int i = 1; i < threads; i++) others.emplace_back(moedge_steps, &run);
        moedge_steps(&run);
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
