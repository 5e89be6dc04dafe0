// The C interface of libmoedge_cpu.so. Python's side is library.py.
#ifndef MOEDGE_CPU_H
#define MOEDGE_CPU_H

#include <stdint.h>

#define MOEDGE_JOIN_(a, b) a##_##b
#define MOEDGE_JOIN(a, b) MOEDGE_JOIN_(a, b)
// The name of a kernel that is compiled for the instruction set MOEDGE_SET.
#define MOEDGE_NAMED(name) MOEDGE_JOIN(name, MOEDGE_SET)
#define MOEDGE_EXPORT extern "C" __attribute__((visibility("default")))

// Instruction sets, from the least to the most: each has what those before it have.
enum moedge_set {
    MOEDGE_NONE = 0,
    MOEDGE_AVX2 = 1,        // AVX2, FMA, F16C
    MOEDGE_AVX512 = 2,      // AVX-512 F, BW, VL, DQ
    MOEDGE_AVX512BF16 = 3,  // AVX-512 BF16 and VNNI
};

// Every kernel: X(name, arguments with types, arguments).
#define MOEDGE_KERNELS(X)

// A checksum of the sources, which the loader compares with the sources beside it.
MOEDGE_EXPORT uint32_t moedge_version(void);
// The most that this processor and its operating system support, an enum moedge_set.
MOEDGE_EXPORT int moedge_supported(void);
// Uses the kernels of `set`, or of the most that is supported if that is less; returns which. No kernel may be running.
MOEDGE_EXPORT int moedge_choose(int set);

#define MOEDGE_DECLARE(name, types, args) MOEDGE_EXPORT void name types;
MOEDGE_KERNELS(MOEDGE_DECLARE)
#undef MOEDGE_DECLARE

#endif
