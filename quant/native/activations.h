// What a gated feed-forward block does to its two products.
#ifndef MOEDGE_ACTIVATIONS_H
#define MOEDGE_ACTIVATIONS_H

#include "interface.h"
#include "simd.h"

namespace {

inline vf sigmoid(vf x) { return div(set1(1.0f), add(set1(1.0f), exponential(sub(set1(0.0f), x)))); }

using Activation = moedge_activation;

inline vf gated(Activation activation, vf gate, vf up) {
    if (activation == Activation::SILU) return mul(mul(gate, sigmoid(gate)), up);
    if (activation == Activation::GELU_TANH) {  // 0.5 (1 + tanh z) is the logistic function of 2 z.
        const vf cubic = mul(mul(mul(set1(0.044715f), gate), gate), gate);
        return mul(mul(gate, sigmoid(mul(set1(1.5957691216057308f), add(gate, cubic)))), up);
    }
    gate = min(set1(7.0f), gate);
    up = max(set1(-7.0f), min(set1(7.0f), up));
    return mul(mul(gate, sigmoid(mul(set1(1.702f), gate))), add(up, set1(1.0f)));
}

}  // namespace

#endif
