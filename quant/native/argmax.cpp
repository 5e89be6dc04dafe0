// The first largest number of each row of bfloat16: what greedy decoding takes of logits. quant/native/calls.py calls it.
#include "moedge_cpu.h"
#include "simd.h"

namespace {

// -1 where a number is NaN or the largest is infinite.
int64_t first_largest(const uint16_t* x, int64_t columns) {
    // Several vectors at once, or each maximum would wait for the one before.
    constexpr int SEVERAL = 4;
    vf most[SEVERAL];
    vi wrong = all_lanes(0);
    for (int v = 0; v < SEVERAL; v++) most[v] = set1(-__builtin_inff());
    const int64_t whole = columns / (SEVERAL * W) * (SEVERAL * W);
    for (int64_t i = 0; i < whole; i += SEVERAL * W)
        for (int v = 0; v < SEVERAL; v++) {
            const vf some = from_bf16(x + i + v * W);
            wrong = unless_nan(some, wrong, all_lanes(1));
            most[v] = max(some, most[v]);
        }
    float peak = largest(max(max(most[0], most[1]), max(most[2], most[3])));
    bool finite = sum(to_floats(wrong)) == 0;
    for (int64_t i = whole; i < columns; i++) {
        const float one = bf16_to_float(x[i]);
        finite &= one == one;
        peak = one > peak ? one : peak;
    }
    if (!finite || peak - peak != 0) return -1;
    int64_t at = 0;
    for (; at < whole; at += SEVERAL * W) {
        vf four = from_bf16(x + at);
        for (int v = 1; v < SEVERAL; v++) four = max(four, from_bf16(x + at + v * W));
        if (!(largest(four) < peak)) break;
    }
    while (bf16_to_float(x[at]) != peak) at++;
    return at;
}

}  // namespace

// Of rows of bfloat16 logits, `stride` numbers apart, into `ids` [rows].
extern "C" void MOEDGE_NAMED(moedge_argmax)(const uint16_t* logits, int64_t stride, int64_t rows, int64_t columns, int64_t* ids) {
    for (int64_t r = 0; r < rows; r++) ids[r] = first_largest(logits + r * stride, columns);
}
