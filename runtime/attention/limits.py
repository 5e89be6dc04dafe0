"""How much scratch decoding over the cache takes. Torch-free, because the planner counts it."""

from __future__ import annotations

# Elements of keys (and of values) that one thread multiplies in one call: enough that calls cost little beside it.
JOB_NUMEL = 1 << 20
# So little is computed before another thread has woken up.
LITTLE_NUMEL = 1 << 18
# Bytes of what blocks contribute to their sequences, before it is summed up.
PARTS_NBYTES = 32 << 20
# Blocks of fewer tokens are gathered and joined to pieces of about as many: products of fewer cost as much.
PIECE_TOKENS = 32
