"""Gated activations inside a kernel: device functions, in float32."""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, NAME: tl.constexpr):
    if NAME == "silu":
        result = gate * tl.sigmoid(gate) * up
    elif NAME == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u).
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate * tl.sigmoid(2.0 * u) * up
    else:
        tl.static_assert(NAME == "clamped_swiglu", "an activation that recognise() does not know")
        # gpt_oss: gate below 7, up within 7, and one more than up.
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return result
