// What processor this is, and the functions that call the kernels compiled for it. Compiled for every x86-64.
#include "attention.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOEDGE_DECLARE_SETS(name, types, args) \
    extern "C" void name##_avx2 types;         \
    extern "C" void name##_avx512 types;       \
    extern "C" void name##_avx512bf16 types;
MOEDGE_ATTENTION_KERNELS(MOEDGE_DECLARE_SETS)
MOEDGE_KERNELS(MOEDGE_DECLARE_SETS)
MOEDGE_PORTABLE_KERNELS(MOEDGE_DECLARE_SETS)

#define MOEDGE_DECLARE_AMX(name, types, args) extern "C" void name##_amx types;
MOEDGE_ATTENTION_KERNELS(MOEDGE_DECLARE_AMX)

#define MOEDGE_DECLARE_PORTABLE(name, types, args) \
    extern "C" void name##_ssse3 types;            \
    extern "C" void name##_portable types;
MOEDGE_PORTABLE_KERNELS(MOEDGE_DECLARE_PORTABLE)

namespace {

int chosen = MOEDGE_NONE;

bool has(unsigned value, int bit) { return value >> bit & 1; }

// State that the operating system saves for every thread: of SSE and AVX, of AVX-512 with these, and AMX's tiles.
enum : unsigned { AVX_STATE = 0x6, AVX512_STATE = 0xe6, TILE_STATE = 0x60000 };

bool saves(unsigned wanted) {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & wanted) == wanted;
}

// Asks Linux, which saves tiles for processes only that have asked, for all threads. It may refuse.
bool may_use_tiles() {
    constexpr int REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of <asm/prctl.h>
    return saves(TILE_STATE) && syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

// The most that is supported, and not more than `most`.
int supported(int most) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27) || !has(c, 12) || !has(c, 29)) return MOEDGE_NONE;  // OSXSAVE, FMA, F16C
    if (!saves(AVX_STATE) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, 5)) return MOEDGE_NONE;  // AVX2
    const bool avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // F, DQ, BW, VL
    if (!avx512 || !saves(AVX512_STATE)) return most < MOEDGE_AVX2 ? most : int(MOEDGE_AVX2);
    const bool vnni = has(c, 11), amx = has(d, 22) && has(d, 24) && has(d, 25);  // AMX BF16, TILE, INT8
    const bool bf16 = vnni && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, 5);
    if (!bf16 || most <= MOEDGE_AVX512) return most < MOEDGE_AVX512 ? most : int(MOEDGE_AVX512);
    return most >= MOEDGE_AMX && amx && may_use_tiles() ? MOEDGE_AMX : MOEDGE_AVX512BF16;
}

bool has_ssse3() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && has(c, 9);
}

const bool ssse3 = has_ssse3();

}  // namespace

int64_t moedge_attention_scratch(const moedge_attention *a) { return layout_of(*a).nbytes; }

uint32_t moedge_version(void) { return MOEDGE_VERSION; }

int moedge_supported(void) { return supported(MOEDGE_AMX); }

int moedge_choose(int set) { return chosen = supported(set); }

#define MOEDGE_CALL_CHOSEN(name, args)                              \
    if (chosen >= MOEDGE_AVX512BF16) return name##_avx512bf16 args; \
    if (chosen >= MOEDGE_AVX512) return name##_avx512 args;         \
    if (chosen >= MOEDGE_AVX2) return name##_avx2 args;

#define MOEDGE_DISPATCH_AMX(name, types, args)              \
    void name types {                                       \
        if (chosen >= MOEDGE_AMX) return name##_amx args;   \
        MOEDGE_CALL_CHOSEN(name, args)                      \
    }
MOEDGE_ATTENTION_KERNELS(MOEDGE_DISPATCH_AMX)

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
