// Steps of a decoder layer that threads run together, one after the other, in one call: products with matrices in order
// `tiles`, and what a layer computes around them. matmul/steps.py describes them.
//
// Every thread runs all steps and takes items of each from a counter until none is left. A row's bits depend on the row
// alone: all sums have one order.
#include <sched.h>

#include "moedge_cpu.h"
#include "simd.h"

extern "C" void MOEDGE_NAMED(moedge_multiply)(const int64_t* given);
extern "C" void MOEDGE_NAMED(moedge_experts)(const int64_t* given);
extern "C" void MOEDGE_NAMED(moedge_attend)(const struct moedge_attention*, int64_t begin, int64_t end, void* scratch);
extern "C" void MOEDGE_NAMED(moedge_attend_reduce)(const struct moedge_attention*, int64_t, int64_t, void* scratch);

namespace {

// The counters of a step, in cache lines of their own: items taken, items done, threads that entered and that left.
enum { TAKEN = 0, ENTERED = 16, LEFT = 24, COUNTERS = 32 };
// The rows that one item of a step for rows computes.
constexpr int64_t ROWS_OF_ITEM = 4;

struct Range {
    int64_t begin, end;
};

// The next item's rows; empty where none is left.
inline Range take_rows(int64_t* counters, int64_t rows, int64_t at_once) {
    const int64_t begin = __atomic_fetch_add(counters + TAKEN, 1, __ATOMIC_ACQ_REL) * at_once;
    return {begin, begin + at_once < rows ? begin + at_once : rows};
}

inline float float_of(int64_t bits) {
    const uint32_t low = (uint32_t)bits;
    float number;
    memcpy(&number, &low, 4);
    return number;
}

// The weights of a norm, at W elements; `plus_one` where 1 + weight multiplies.
inline vf norm_weight(const uint16_t* weight, int64_t at, bool plus_one) {
    const vf found = from_bf16(weight + at);
    return plus_one ? add(found, set1(1.0f)) : found;
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

// total = x + added, where `added` is not null; out = RMSNorm(total) * weight. All [rows, columns].
struct Norm {
    const uint16_t *x, *added, *weight;
    uint16_t *total, *out;
    float eps;
    bool plus_one;
    int64_t rows, columns;

    explicit Norm(const int64_t* given)
        : x((const uint16_t*)given[0]), added((const uint16_t*)given[1]), weight((const uint16_t*)given[2]),
          total((uint16_t*)given[3]), out((uint16_t*)given[4]), eps(float_of(given[5])), plus_one(given[6] != 0),
          rows(given[7]), columns(given[8]) {}

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

void norm(const int64_t* given, int64_t* counters) {
    const Norm norm(given);
    for (Range some; (some = take_rows(counters, norm.rows, ROWS_OF_ITEM)).begin < norm.rows;)
        for (int64_t r = some.begin; r < some.end; r++) norm.row(r);
}

// Heads [rows, heads, dim] of queries or keys, in place: RMSNorm of each head where there is a weight, then rotary
// embedding of the first `rotary` elements, halves against each other. cos and sin are [rows, rotary].
struct Heads {
    uint16_t* x;
    int64_t heads;
    const uint16_t* weight;
    float eps;
    bool plus_one;

    static constexpr int64_t FIELDS = 5;
    explicit Heads(const int64_t* given)
        : x((uint16_t*)given[0]), heads(given[1]), weight((const uint16_t*)given[2]), eps(float_of(given[3])),
          plus_one(given[4] != 0) {}

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

// Keys and values [rows, heads, dim] of a pass go into a cache of bfloat16: [blocks, heads, block, dim].
struct Cache {
    const uint16_t *keys, *values;
    uint16_t *key_codes, *value_codes;
    const int64_t* slots;
    int64_t heads, dim, block;

    explicit Cache(const int64_t* given)
        : keys((const uint16_t*)given[0]), values((const uint16_t*)given[1]), key_codes((uint16_t*)given[2]),
          value_codes((uint16_t*)given[3]), slots((const int64_t*)given[4]), heads(given[5]), dim(given[6]),
          block(given[7]) {}

    void put(int64_t r) const {
        const int64_t id = slots[r] / block, offset = slots[r] % block;
        for (int64_t h = 0; h < heads; h++) {
            const int64_t to = ((id * heads + h) * block + offset) * dim, from = (r * heads + h) * dim;
            memcpy(key_codes + to, keys + from, (size_t)dim * 2);
            memcpy(value_codes + to, values + from, (size_t)dim * 2);
        }
    }
};

// `given`: rows, dim, rotary, cos, sin; Heads of queries and of keys; then whether a Cache follows, and it.
void heads(const int64_t* given, int64_t* counters) {
    const int64_t rows = given[0], dim = given[1], rotary = given[2];
    const uint16_t *cos = (const uint16_t*)given[3], *sin = (const uint16_t*)given[4];
    const Heads queries(given + 5), keys(given + 5 + Heads::FIELDS);
    const int64_t* stores = given + 5 + 2 * Heads::FIELDS;
    const Cache cache(stores + 1);
    for (Range some; (some = take_rows(counters, rows, 1)).begin < rows;) {
        const int64_t r = some.begin;
        queries.rotate(r, dim, rotary, cos + r * rotary, sin + r * rotary);
        keys.rotate(r, dim, rotary, cos + r * rotary, sin + r * rotary);
        if (*stores) cache.put(r);
    }
}

// Scores of experts: logits [rows, E] = x [rows, columns] times weight [E, columns] transposed.
struct Router {
    const uint16_t *x, *weight;
    float* logits;
    int64_t rows, columns, experts;

    explicit Router(const int64_t* given)
        : x((const uint16_t*)given[0]), weight((const uint16_t*)given[1]), logits((float*)given[2]), rows(given[3]),
          columns(given[4]), experts(given[5]) {}

    // What an item computes: rows that stay in a core's second cache while all experts are multiplied by them.
    static constexpr int64_t EXPERTS = 4, ROWS = 64;

    template <int ROWS, int MANY>
    void block(int64_t row, int64_t expert) const {
        vf sums[ROWS][MANY];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
            for (int e = 0; e < MANY; e++) sums[r][e] = set1(0.0f);
        for (int64_t i = 0; i < columns; i += W) {
            vf scores[MANY];
#pragma GCC unroll 16
            for (int e = 0; e < MANY; e++) scores[e] = from_bf16(weight + (expert + e) * columns + i);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const vf part = from_bf16(x + (row + r) * columns + i);
#pragma GCC unroll 16
                for (int e = 0; e < MANY; e++) sums[r][e] = fma(scores[e], part, sums[r][e]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int e = 0; e < MANY; e++) logits[(row + r) * experts + expert + e] = sum(sums[r][e]);
    }

    template <int MANY>
    void rows_of(int64_t expert, int64_t row, int64_t end) const {
        for (; row + 4 <= end; row += 4) block<4, MANY>(row, expert);
        for (; row < end; row++) block<1, MANY>(row, expert);
    }
};

void router(const int64_t* given, int64_t* counters) {
    const Router router(given);
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

// The experts of every row, by the largest logits, of equal ones the first: ids and weights [rows, most]. Weights are
// softmax over all experts, or with `normalised` over those that were chosen.
struct Choice {
    const float* logits;
    int64_t* ids;
    float* weights;
    int64_t rows, experts, most;
    bool normalised;

    explicit Choice(const int64_t* given)
        : logits((const float*)given[0]), ids((int64_t*)given[1]), weights((float*)given[2]), rows(given[3]),
          experts(given[4]), most(given[5]), normalised(given[6] != 0) {}

    void row(int64_t r) const {
        const float* from = logits + r * experts;
        int64_t* chosen = ids + r * most;
        float* given = weights + r * most;
        // Insertion into the list of the best ones so far. A logit that is NaN enters only while the list is short.
        int64_t count = 0;
        for (int64_t e = 0; e < experts; e++) {
            if (count == most && !(from[e] > given[most - 1])) continue;
            int64_t at = count < most ? count++ : most - 1;
            for (; at > 0 && from[e] > given[at - 1]; at--) {
                given[at] = given[at - 1];
                chosen[at] = chosen[at - 1];
            }
            given[at] = from[e];
            chosen[at] = e;
        }
        const float peak = given[0];
        float total = 0;
        if (!normalised)
            for (int64_t e = 0; e < experts; e++) total += exponential(from[e] - peak);
        for (int64_t a = 0; a < most; a++) {
            given[a] = exponential(given[a] - peak);
            if (normalised) total += given[a];
        }
        for (int64_t a = 0; a < most; a++) given[a] /= total;
    }

    static float exponential(float x) { return exp2(x * 1.44269504f); }
};

void choose(const int64_t* given, int64_t* counters) {
    const Choice choice(given);
    for (Range some; (some = take_rows(counters, choice.rows, ROWS_OF_ITEM)).begin < choice.rows;)
        for (int64_t r = some.begin; r < some.end; r++) choice.row(r);
}

// Sorts assignments [rows, most] by expert, and describes the experts that are wanted as jobs of moedge_experts, one for
// each MOEDGE_MOST_ROWS rows at most.
// `table` [experts, 18] has both matrices of every expert; `nbytes` is the scratch of a row.
struct Groups {
    const int64_t *ids, *table;
    int64_t *counts, *token_ids, *assignment_rows, *given_experts, *jobs;
    int64_t rows, most, experts, nbytes;

    static constexpr int64_t MATRICES = 18, FIELDS = 3 + MATRICES, NUM_JOBS = 8;
    explicit Groups(const int64_t* given)
        : ids((const int64_t*)given[0]), table((const int64_t*)given[1]), counts((int64_t*)given[2]),
          token_ids((int64_t*)given[3]), assignment_rows((int64_t*)given[4]), given_experts((int64_t*)given[5]),
          jobs((int64_t*)given[6]), rows(given[7]), most(given[8]), experts(given[9]), nbytes(given[10]) {}

    void group() const {
        const int64_t assignments = rows * most;
        for (int64_t e = 0; e < experts; e++) counts[e] = 0;
        for (int64_t a = 0; a < assignments; a++) counts[ids[a]]++;
        int64_t first = 0, number = 0;
        for (int64_t e = 0; e < experts; e++) {
            if (counts[e] == 0) continue;
            const int64_t end = first + counts[e], parts = (counts[e] + MOEDGE_MOST_ROWS - 1) / MOEDGE_MOST_ROWS;
            const int64_t at_once = (counts[e] + parts - 1) / parts;
            // From here on the expert's next row.
            counts[e] = first;
            for (int64_t rows_left; (rows_left = end - first) > 0; first += at_once < rows_left ? at_once : rows_left) {
                int64_t* job = jobs + number++ * FIELDS;
                job[0] = first;
                job[1] = at_once < rows_left ? at_once : rows_left;
                job[2] = first * nbytes;
                memcpy(job + 3, table + e * MATRICES, MATRICES * sizeof(int64_t));
            }
        }
        given_experts[NUM_JOBS] = number;
        for (int64_t a = 0; a < assignments; a++) {
            const int64_t row = counts[ids[a]]++;
            assignment_rows[a] = row;
            token_ids[row] = a / most;
        }
        for (int64_t e = 0; e < experts; e++) counts[e] = 0;
        for (int64_t a = 0; a < assignments; a++) counts[ids[a]]++;
    }
};

// out [rows, columns] = residual + the sum of each row's experts, weighed, in the order in which they were chosen.
struct Combination {
    const uint16_t *outputs, *residual;
    const int64_t* assignment_rows;
    const float* weights;
    uint16_t* out;
    int64_t rows, most, columns;

    explicit Combination(const int64_t* given)
        : outputs((const uint16_t*)given[0]), residual((const uint16_t*)given[1]), assignment_rows((const int64_t*)given[2]),
          weights((const float*)given[3]), out((uint16_t*)given[4]), rows(given[5]), most(given[6]), columns(given[7]) {}

    void row(int64_t r) const {
        for (int64_t i = 0; i < columns; i += W) {
            vf total = set1(0.0f);
            for (int64_t a = r * most; a < (r + 1) * most; a++)
                total = fma(set1(weights[a]), from_bf16(outputs + assignment_rows[a] * columns + i), total);
            to_bf16(add(total, from_bf16(residual + r * columns + i)), out + r * columns + i);
        }
    }
};

void combine(const int64_t* given, int64_t* counters) {
    const Combination combination(given);
    for (Range some; (some = take_rows(counters, combination.rows, ROWS_OF_ITEM)).begin < combination.rows;)
        for (int64_t r = some.begin; r < some.end; r++) combination.row(r);
}

// Attention: the address of its arguments, items, items that are taken at once, the address of a counter of threads,
// scratch that begins at a multiple of 64, and its bytes for one thread.
template <class Kernel>
void attend(const int64_t* given, int64_t* counters, int64_t thread, Kernel kernel) {
    char* scratch = (char*)given[3] + thread * given[4];
    for (Range some; (some = take_rows(counters, given[1], given[2])).begin < given[1];)
        kernel((const moedge_attention*)given[0], some.begin, some.end, scratch);
}

// Whether all threads that entered a step have left it.
bool is_over(const int64_t* counters) {
    // In this order: a thread that enters and leaves between the two reads must not stand for one that works.
    const int64_t left = __atomic_load_n(counters + LEFT, __ATOMIC_SEQ_CST);
    return left == __atomic_load_n(counters + ENTERED, __ATOMIC_SEQ_CST);
}

enum step { MULTIPLY, EXPERTS, NORM, HEADS, ROUTER, CHOOSE, GROUP, COMBINE, ATTEND, REDUCE };

void run(int64_t kind, const int64_t* given, int64_t* counters, int64_t thread) {
    switch (kind) {
        case MULTIPLY: return MOEDGE_NAMED(moedge_multiply)(given);
        case EXPERTS: return MOEDGE_NAMED(moedge_experts)(given);
        case NORM: return norm(given, counters);
        case HEADS: return heads(given, counters);
        case ROUTER: return router(given, counters);
        case CHOOSE: return choose(given, counters);
        case GROUP:
            if (take_rows(counters, 1, 1).begin == 0) Groups(given).group();
            return;
        case COMBINE: return combine(given, counters);
        case ATTEND: return attend(given, counters, thread, MOEDGE_NAMED(moedge_attend));
        case REDUCE: return attend(given, counters, thread, MOEDGE_NAMED(moedge_attend_reduce));
    }
}

}  // namespace

// `given`: the number of steps, the address of a counter of threads, the address of all steps' counters, which are 0;
// then for every step what it is, the address of its arguments, and whether the next one has to wait for it and for
// those before it.
extern "C" void MOEDGE_NAMED(moedge_steps)(const int64_t* given) {
    const int64_t count = given[0];
    const int64_t thread = __atomic_fetch_add((int64_t*)given[1], 1, __ATOMIC_RELAXED);
    int64_t* all = (int64_t*)given[2];
    for (int64_t s = 0, first = 0; s < count; s++) {
        const int64_t* step = given + 3 + 3 * s;
        int64_t* counters = all + s * COUNTERS;
        // A thread that comes after the last item was taken finds none. One that took an item had entered before, so
        // that whoever finds none left sees it here until it has left.
        __atomic_fetch_add(counters + ENTERED, 1, __ATOMIC_SEQ_CST);
        run(step[0], (const int64_t*)step[1], counters, thread);
        __atomic_fetch_add(counters + LEFT, 1, __ATOMIC_SEQ_CST);
        if (!step[2]) continue;
        for (; first <= s; first++)
            while (!is_over(all + first * COUNTERS)) sched_yield();
    }
}
