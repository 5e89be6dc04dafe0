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

inline int64_t ceil_of(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

}  // namespace

#endif
