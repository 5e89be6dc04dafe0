// Steps of a decoder layer that threads run together, one after the other, in one call: products with matrices in order
// `tiles`, and what a layer computes around them. matmul/steps.py describes them.
//
// Every thread runs all steps and takes items of each from a counter until none is left. A row's bits depend on the row
// alone: all sums have one order.
#include <sched.h>

#include "activations.h"
#include "moedge_cpu.h"
#include "simd.h"

extern "C" void MOEDGE_NAMED(moedge_multiply)(const moedge_product*);
extern "C" void MOEDGE_NAMED(moedge_experts)(const moedge_mixture*);
extern "C" void MOEDGE_NAMED(moedge_attend)(const moedge_attention*, int64_t begin, int64_t end, void* scratch);
extern "C" void MOEDGE_NAMED(moedge_attend_reduce)(const moedge_attention*, int64_t begin, int64_t end, void* scratch);

namespace {

// The counters of a step, in cache lines of their own: items taken, items done, threads that entered and that left.
enum { TAKEN = 0, ENTERED = 16, LEFT = 24 };
// Numbers that one item of a step computes at least: threads that take an item wait for each other as long as 100 take.
constexpr int64_t ITEM_NUMBERS = 2048;

// Rows of so many numbers that one item computes: a 32nd of all, so that threads end together, if that is enough.
inline int64_t rows_at_once(int64_t rows, int64_t numbers) {
    const int64_t few = (ITEM_NUMBERS + numbers - 1) / numbers, many = (rows + 31) / 32;
    return few > many ? few : many;
}

struct Range {
    int64_t begin, end;
};

// The next item's rows; empty where none is left.
inline Range take_rows(int64_t* counters, int64_t rows, int64_t at_once) {
    const int64_t begin = __atomic_fetch_add(counters + TAKEN, 1, __ATOMIC_ACQ_REL) * at_once;
    return {begin, begin + at_once < rows ? begin + at_once : rows};
}

// The weights of a norm, at W elements; `plus_one` where 1 + weight multiplies.
inline vf norm_weight(const uint16_t* weight, int64_t at, bool plus_one) {
    const vf some = from_bf16(weight + at);
    return plus_one ? add(some, set1(1.0f)) : some;
}

// 1 / sqrt(mean of squares + eps) of x [columns].
inline float inverse_rms(const uint16_t* x, int64_t columns, float eps) {
    vf squares = set1(0.0f);
    for (int64_t i = 0; i < columns; i += W) {
        const vf part = from_bf16(x + i);
        squares = fma(part, part, squares);
    }
    return 1.0f / __builtin_sqrtf(sum(squares) / (float)columns + eps);
}

struct Norm : moedge_norm {
    void row(int64_t r) const {
        const uint16_t* from = x + r * columns;
        if (added != nullptr) {
            uint16_t* to = total + r * columns;
            for (int64_t i = 0; i < columns; i += W) to_bf16(add(from_bf16(from + i), from_bf16(added + r * columns + i)), to + i);
            from = to;
        }
        const vf scale = set1(inverse_rms(from, columns, eps));
        for (int64_t i = 0; i < columns; i += W)
            to_bf16(mul(mul(from_bf16(from + i), scale), norm_weight(weight, i, plus_one)), out + r * columns + i);
    }
};

void run(const Norm& norm, int64_t* counters) {
    const int64_t at_once = rows_at_once(norm.rows, norm.columns);
    for (Range some; (some = take_rows(counters, norm.rows, at_once)).begin < norm.rows;)
        for (int64_t r = some.begin; r < some.end; r++) norm.row(r);
}

struct HeadRows : moedge_head_rows {
    void rotate(int64_t r, int64_t dim, int64_t rotary, const uint16_t* cos, const uint16_t* sin) const {
        const int64_t half = rotary / 2;
        for (int64_t h = 0; h < heads; h++) {
            uint16_t* head = x + (r * heads + h) * dim;
            const vf scale = set1(weight == nullptr ? 1.0f : inverse_rms(head, dim, eps));
            const auto normed = [&](int64_t i) {
                const vf part = from_bf16(head + i);
                return weight == nullptr ? part : mul(mul(part, scale), norm_weight(weight, i, plus_one));
            };
            for (int64_t i = 0; i < half; i += W) {
                const vf first = normed(i), second = normed(half + i);
                to_bf16(sub(mul(first, from_bf16(cos + i)), mul(second, from_bf16(sin + i))), head + i);
                to_bf16(fma(second, from_bf16(cos + half + i), mul(first, from_bf16(sin + half + i))), head + half + i);
            }
            for (int64_t i = rotary; i < dim && weight != nullptr; i += W) to_bf16(normed(i), head + i);
        }
    }
};

struct Heads : moedge_heads {
    void row(int64_t r) const {
        HeadRows{queries}.rotate(r, dim, rotary, cos + r * rotary, sin + r * rotary);
        HeadRows{keys}.rotate(r, dim, rotary, cos + r * rotary, sin + r * rotary);
        if (key_codes != nullptr) store(r);
    }

    void store(int64_t r) const {
        const int64_t id = slots[r] / block, offset = slots[r] % block;
        for (int64_t h = 0; h < keys.heads; h++) {
            const int64_t to = ((id * keys.heads + h) * block + offset) * dim, from = (r * keys.heads + h) * dim;
            memcpy(key_codes + to, keys.x + from, (size_t)dim * 2);
            memcpy(value_codes + to, values + from, (size_t)dim * 2);
        }
    }
};

void run(const Heads& heads, int64_t* counters) {
    const int64_t at_once = rows_at_once(heads.rows, (heads.queries.heads + heads.keys.heads) * heads.dim);
    for (Range some; (some = take_rows(counters, heads.rows, at_once)).begin < heads.rows;)
        for (int64_t r = some.begin; r < some.end; r++) heads.row(r);
}

struct Gating : moedge_gating {
    // The columns of a row that one item computes.
    static constexpr int64_t COLUMNS = 512;

    void piece(int64_t r, int64_t begin) const {
        const int64_t end = begin + COLUMNS < columns ? begin + COLUMNS : columns;
        uint16_t* to = gate + r * columns;
        for (int64_t i = begin; i < end; i += W)
            to_bf16(gated(activation, from_bf16(to + i), from_bf16(up + r * columns + i)), to + i);
    }
};

void run(const Gating& gating, int64_t* counters) {
    const int64_t pieces = (gating.columns + Gating::COLUMNS - 1) / Gating::COLUMNS;
    const int64_t at_once = rows_at_once(gating.rows * pieces, Gating::COLUMNS);
    for (Range some; (some = take_rows(counters, gating.rows * pieces, at_once)).begin < gating.rows * pieces;)
        for (int64_t p = some.begin; p < some.end; p++) gating.piece(p / pieces, p % pieces * Gating::COLUMNS);
}

struct Router : moedge_router {
    // What an item computes: rows that stay in a core's second cache while all experts are multiplied by them.
    static constexpr int64_t EXPERTS = 4, ROWS = 64;

    template <int COUNT, int MANY>
    void block(int64_t row, int64_t expert) const {
        vf sums[COUNT][MANY];
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++)
#pragma GCC unroll 16
            for (int e = 0; e < MANY; e++) sums[r][e] = set1(0.0f);
        for (int64_t i = 0; i < columns; i += W) {
            vf scores[MANY];
#pragma GCC unroll 16
            for (int e = 0; e < MANY; e++) scores[e] = from_bf16(weight + (expert + e) * columns + i);
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; r++) {
                const vf part = from_bf16(x + (row + r) * columns + i);
#pragma GCC unroll 16
                for (int e = 0; e < MANY; e++) sums[r][e] = fma(scores[e], part, sums[r][e]);
            }
        }
        for (int r = 0; r < COUNT; r++)
            for (int e = 0; e < MANY; e++) logits[(row + r) * experts + expert + e] = sum(sums[r][e]);
    }

    template <int MANY>
    void rows_of(int64_t expert, int64_t row, int64_t end) const {
        for (; row + 4 <= end; row += 4) block<4, MANY>(row, expert);
        for (; row < end; row++) block<1, MANY>(row, expert);
    }
};

void run(const Router& router, int64_t* counters) {
    const int64_t items = (router.experts + Router::EXPERTS - 1) / Router::EXPERTS;
    const int64_t blocks = (router.rows + Router::ROWS - 1) / Router::ROWS;
    for (Range some; (some = take_rows(counters, blocks * items, 1)).begin < blocks * items;) {
        const int64_t first = some.begin / items * Router::ROWS, expert = some.begin % items * Router::EXPERTS;
        const int64_t end = first + Router::ROWS < router.rows ? first + Router::ROWS : router.rows;
        if (expert + Router::EXPERTS <= router.experts) router.rows_of<Router::EXPERTS>(expert, first, end);
        else
            for (int64_t e = expert; e < router.experts; e++) router.rows_of<1>(e, first, end);
    }
}

struct Choice : moedge_choice {
    void row(int64_t r) const {
        const float* from = logits + r * experts;
        int64_t* best = ids + r * chosen;
        float* scores = weights + r * chosen;
        // Insertion into the list of the best ones so far. A logit that is NaN enters only while the list is short.
        int64_t count = 0;
        for (int64_t e = 0; e < experts; e++) {
            if (count == chosen && !(from[e] > scores[chosen - 1])) continue;
            int64_t at = count < chosen ? count++ : chosen - 1;
            for (; at > 0 && from[e] > scores[at - 1]; at--) {
                scores[at] = scores[at - 1];
                best[at] = best[at - 1];
            }
            scores[at] = from[e];
            best[at] = e;
        }
        const float peak = scores[0];
        float total = 0;
        if (!normalised)
            for (int64_t e = 0; e < experts; e++) total += exponential(from[e] - peak);
        for (int64_t a = 0; a < chosen; a++) {
            scores[a] = exponential(scores[a] - peak);
            if (normalised) total += scores[a];
        }
        for (int64_t a = 0; a < chosen; a++) scores[a] /= total;
    }
};

void run(const Choice& choice, int64_t* counters) {
    const int64_t at_once = rows_at_once(choice.rows, choice.experts);
    for (Range some; (some = take_rows(counters, choice.rows, at_once)).begin < choice.rows;)
        for (int64_t r = some.begin; r < some.end; r++) choice.row(r);
}

struct Grouping : moedge_grouping {
    void group() const {
        const int64_t assignments = rows * chosen;
        for (int64_t e = 0; e < experts; e++) counts[e] = 0;
        for (int64_t a = 0; a < assignments; a++) counts[ids[a]]++;
        int64_t first = 0, number = 0;
        for (int64_t e = 0; e < experts; e++) {
            if (counts[e] == 0) continue;
            const int64_t end = first + counts[e], parts = (counts[e] + MOEDGE_MOST_ROWS - 1) / MOEDGE_MOST_ROWS;
            const int64_t at_once = (counts[e] + parts - 1) / parts;
            // From here on the expert's next row.
            counts[e] = first;
            for (int64_t rows_left; (rows_left = end - first) > 0; first += at_once < rows_left ? at_once : rows_left)
                mixture->jobs[number++] = {first, at_once < rows_left ? at_once : rows_left, first * row_nbytes, table[e]};
        }
        mixture->num_jobs = number;
        for (int64_t a = 0; a < assignments; a++) {
            const int64_t row = counts[ids[a]]++;
            assignment_rows[a] = row;
            token_ids[row] = a / chosen;
        }
        for (int64_t e = 0; e < experts; e++) counts[e] = 0;
        for (int64_t a = 0; a < assignments; a++) counts[ids[a]]++;
    }
};

struct Combination : moedge_combination {
    void row(int64_t r) const {
        for (int64_t i = 0; i < columns; i += W) {
            vf total = set1(0.0f);
            for (int64_t a = r * chosen; a < (r + 1) * chosen; a++)
                total = fma(set1(weights[a]), from_bf16(outputs + assignment_rows[a] * columns + i), total);
            to_bf16(add(total, from_bf16(residual + r * columns + i)), out + r * columns + i);
        }
    }
};

void run(const Combination& combination, int64_t* counters) {
    const int64_t at_once = rows_at_once(combination.rows, combination.chosen * combination.columns);
    for (Range some; (some = take_rows(counters, combination.rows, at_once)).begin < combination.rows;)
        for (int64_t r = some.begin; r < some.end; r++) combination.row(r);
}

template <class Kernel>
void attend(const moedge_attention_step& step, int64_t* counters, int64_t thread, Kernel kernel) {
    char* scratch = step.scratch + thread * step.thread_nbytes;
    for (Range some; (some = take_rows(counters, step.items, step.at_once)).begin < step.items;)
        kernel(step.attention, some.begin, some.end, scratch);
}

// Whether all threads that entered a step have left it.
bool is_over(const int64_t* counters) {
    // In this order: a thread that enters and leaves between the two reads must not stand for one that works.
    const int64_t left = __atomic_load_n(counters + LEFT, __ATOMIC_SEQ_CST);
    return left == __atomic_load_n(counters + ENTERED, __ATOMIC_SEQ_CST);
}

// The arguments of a step with the functions that compute them.
template <class Arguments, class Struct>
Arguments as(const void* arguments) {
    return Arguments{*(const Struct*)arguments};
}

void run(const moedge_step& step, int64_t* counters, int64_t thread) {
    using Kind = moedge_kind;
    const void* const arguments = step.arguments;
    switch (step.kind) {
        case Kind::MULTIPLY: return MOEDGE_NAMED(moedge_multiply)((const moedge_product*)arguments);
        case Kind::EXPERTS: return MOEDGE_NAMED(moedge_experts)((const moedge_mixture*)arguments);
        case Kind::NORM: return run(as<Norm, moedge_norm>(arguments), counters);
        case Kind::HEADS: return run(as<Heads, moedge_heads>(arguments), counters);
        case Kind::GATE: return run(as<Gating, moedge_gating>(arguments), counters);
        case Kind::ROUTER: return run(as<Router, moedge_router>(arguments), counters);
        case Kind::CHOOSE: return run(as<Choice, moedge_choice>(arguments), counters);
        case Kind::GROUP:
            if (take_rows(counters, 1, 1).begin == 0) as<Grouping, moedge_grouping>(arguments).group();
            return;
        case Kind::COMBINE: return run(as<Combination, moedge_combination>(arguments), counters);
        case Kind::ATTEND:
            return attend(*(const moedge_attention_step*)arguments, counters, thread, MOEDGE_NAMED(moedge_attend));
        case Kind::REDUCE:
            return attend(*(const moedge_attention_step*)arguments, counters, thread, MOEDGE_NAMED(moedge_attend_reduce));
    }
}

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_steps)(const moedge_run* steps) {
    const int64_t thread = __atomic_fetch_add(steps->threads, 1, __ATOMIC_RELAXED);
    for (int64_t s = 0, first = 0; s < steps->num_steps; s++) {
        int64_t* counters = steps->counters + s * MOEDGE_STEP_COUNTERS;
        // A thread that comes after the last item was taken finds none. One that took an item had entered before, so
        // that whoever finds none left sees it here until it has left.
        __atomic_fetch_add(counters + ENTERED, 1, __ATOMIC_SEQ_CST);
        run(steps->steps[s], counters, thread);
        __atomic_fetch_add(counters + LEFT, 1, __ATOMIC_SEQ_CST);
        if (!steps->steps[s].waits) continue;
        for (; first <= s; first++)
            while (!is_over(steps->counters + first * MOEDGE_STEP_COUNTERS)) sched_yield();
    }
}
