// What processor this is, and the functions that call the kernels compiled for it. Compiled for every x86-64.
#include "attention.h"

#include <cpuid.h>

#define MOEDGE_DECLARE_SETS(name, types, args) \
    extern "C" void name##_avx2 types;         \
    extern "C" void name##_avx512 types;       \
    extern "C" void name##_avx512bf16 types;
MOEDGE_KERNELS(MOEDGE_DECLARE_SETS)
MOEDGE_PORTABLE_KERNELS(MOEDGE_DECLARE_SETS)

#define MOEDGE_DECLARE_PORTABLE(name, types, args) \
    extern "C" void name##_ssse3 types;            \
    extern "C" void name##_portable types;
MOEDGE_PORTABLE_KERNELS(MOEDGE_DECLARE_PORTABLE)

static_assert(sizeof(moedge_attention) == 232, "attention.py has the same fields");

namespace {

int chosen = MOEDGE_NONE;

bool has(unsigned value, int bit) { return value >> bit & 1; }

// The state that the operating system saves for every thread: SSE, AVX, and with `wide` AVX-512's masks and registers.
bool saves_registers(bool wide) {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const unsigned wanted = wide ? 0xe6 : 0x6;
    return (low & wanted) == wanted;
}

int supported() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27) || !has(c, 12) || !has(c, 29)) return MOEDGE_NONE;  // OSXSAVE, FMA, F16C
    if (!saves_registers(false) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, 5)) return MOEDGE_NONE;  // AVX2
    const bool avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // F, DQ, BW, VL
    if (!avx512 || !saves_registers(true)) return MOEDGE_AVX2;
    const bool vnni = has(c, 11);
    return vnni && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, 5) ? MOEDGE_AVX512BF16 : MOEDGE_AVX512;
}

bool has_ssse3() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && has(c, 9);
}

const bool ssse3 = has_ssse3();

}  // namespace

int64_t moedge_attention_scratch(const moedge_attention *a) { return layout_of(*a).nbytes; }

uint32_t moedge_version(void) { return MOEDGE_VERSION; }

int moedge_supported(void) { return supported(); }

int moedge_choose(int set) {
    const int most = supported();
    return chosen = set < most ? set : most;
}

#define MOEDGE_CALL_CHOSEN(name, args)                              \
    if (chosen >= MOEDGE_AVX512BF16) return name##_avx512bf16 args; \
    if (chosen >= MOEDGE_AVX512) return name##_avx512 args;         \
    if (chosen >= MOEDGE_AVX2) return name##_avx2 args;

#define MOEDGE_DISPATCH(name, types, args) \
    void name types { MOEDGE_CALL_CHOSEN(name, args) }
MOEDGE_KERNELS(MOEDGE_DISPATCH)

#define MOEDGE_DISPATCH_PORTABLE(name, types, args) \
    void name types {                               \
        MOEDGE_CALL_CHOSEN(name, args)              \
        if (ssse3) return name##_ssse3 args;        \
        name##_portable args;                       \
    }
MOEDGE_PORTABLE_KERNELS(MOEDGE_DISPATCH_PORTABLE)
