"""Gated activations as Triton device functions, in float32."""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, NAME: tl.constexpr):
    """The activation called NAME of two tensors of one shape."""
    if NAME == "silu":
        result = gate * tl.sigmoid(gate) * up
    elif NAME == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u).
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate * tl.sigmoid(2.0 * u) * up
    else:
        tl.static_assert(NAME == "clamped_swiglu", "an activation that recognise() does not know")
        # gpt_oss: gate is clamped to at most 7, up to [-7, 7], and 1 is added to up.
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return result
