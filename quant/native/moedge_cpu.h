// The functions of libmoedge_cpu.so; interface.h has their arguments. Python's side is library.py.
#ifndef MOEDGE_CPU_H
#define MOEDGE_CPU_H

#include "interface.h"

#define MOEDGE_JOIN_(a, b) a##_##b
#define MOEDGE_JOIN(a, b) MOEDGE_JOIN_(a, b)
// The name of a kernel that is compiled for the instruction set MOEDGE_SET.
#define MOEDGE_NAMED(name) MOEDGE_JOIN(name, MOEDGE_SET)
#define MOEDGE_EXPORT extern "C" __attribute__((visibility("default")))

// Bytes of the scratch of one thread.
MOEDGE_EXPORT int64_t moedge_attention_scratch(const moedge_attention *a);

// Every kernel: X(name, arguments with types, arguments); those of attention are compiled for one set more.
// moedge_attend computes items begin to end of rows * H or of pieces * H; moedge_attend_reduce, after all pieces have
// been computed, items of rows * H. `scratch` belongs to the calling thread and begins at a multiple of 64.
#define MOEDGE_ATTENTION_KERNELS(X)                                                              \
    X(moedge_attend, (const moedge_attention *a, int64_t begin, int64_t end, void *scratch), \
      (a, begin, end, scratch))                                                                  \
    X(moedge_attend_reduce, (const moedge_attention *a, int64_t begin, int64_t end, void *scratch), \
      (a, begin, end, scratch))
#define MOEDGE_KERNELS(X)                                                                        \
    X(moedge_multiply, (const moedge_product *product), (product))                               \
    X(moedge_experts, (const moedge_mixture *mixture), (mixture))                                \
    X(moedge_row_experts, (const moedge_row_mixture *mixture), (mixture))                        \
    X(moedge_steps, (const moedge_run *run), (run))                                              \
    X(moedge_widen_tiles, (const moedge_tiles_widening *widening), (widening))                   \
    X(moedge_pack, (moedge_packing *packing), (packing))                                         \
    X(moedge_dequantize, (const moedge_blocks *blocks), (blocks))                                \
    X(moedge_argmax, (const uint16_t *logits, int64_t stride, int64_t rows, int64_t columns, int64_t *ids), \
      (logits, stride, rows, columns, ids))

// Kernels that have code for processors without AVX2, too.
#define MOEDGE_PORTABLE_KERNELS(X) X(moedge_widen, (const moedge_widening *widening), (widening))

// A checksum of the sources, which the loader compares with the sources beside it.
MOEDGE_EXPORT uint32_t moedge_version(void);
// The most that this processor and its operating system support, an enum moedge_set.
MOEDGE_EXPORT int moedge_supported(void);
// Uses the kernels of `set`, or of the most that is supported if that is less; returns which. No kernel may be running.
MOEDGE_EXPORT int moedge_choose(int set);

#define MOEDGE_DECLARE(name, types, args) MOEDGE_EXPORT void name types;
MOEDGE_ATTENTION_KERNELS(MOEDGE_DECLARE)
MOEDGE_KERNELS(MOEDGE_DECLARE)
MOEDGE_PORTABLE_KERNELS(MOEDGE_DECLARE)
#undef MOEDGE_DECLARE

#endif
