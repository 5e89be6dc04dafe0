// How threads that call a function with the same arguments share its items: each takes the next one from a counter.
#ifndef MOEDGE_WORK_H
#define MOEDGE_WORK_H

#include <sched.h>
#include <stdint.h>

namespace {

// A counter of items taken and of items done, in memory that the threads share; both begin at 0.
struct Work {
    int64_t* counters;

    int64_t take() const { return __atomic_fetch_add(counters, 1, __ATOMIC_ACQ_REL); }
    void finish() const { __atomic_fetch_add(counters + 8, 1, __ATOMIC_RELEASE); }
    void wait(int64_t items) const {
        while (__atomic_load_n(counters + 8, __ATOMIC_ACQUIRE) < items) sched_yield();
    }
};

// Processors that this process may run on: a bound of the threads that share items.
inline int64_t num_processors() {
    static int64_t found = 0;
    if (__atomic_load_n(&found, __ATOMIC_RELAXED) == 0) {
        cpu_set_t mine;
        const int64_t count = sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine) : 1024;
        __atomic_store_n(&found, count, __ATOMIC_RELAXED);
    }
    return __atomic_load_n(&found, __ATOMIC_RELAXED);
}

inline int64_t ceil_of(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

}  // namespace

#endif
