"""How many tokens a pass should take: what the job can use, what arithmetic can use, what memory allows. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from ..shape.model_shape import ModelShape
from .draft import Draft
from .job import JobShape

LEAST_TOKENS = 256
# From this many tokens on the products with dense matrices run at their full rate anywhere.
DENSE_TOKENS = 1024
# Rows of an expert from which its products do.
EXPERT_ROWS = 128
# The prompts of all live sequences should take no more than this many passes.
START_PASSES = 8
# Most of what the budget leaves, beside its fixed parts, that larger passes may take from KV blocks and held experts.
SHARE = 1 / 8


def choose_tokens(
    shape: ModelShape, job: JobShape, max_sequences: int, budget: int, draft: Callable[[int], Draft]
) -> int:
    """Tokens per pass, a power of two. `draft(n)` is the draft for passes of n tokens.

    Beyond what saturates the arithmetic, tokens only make passes longer; below it, a pass over weights costs the same
    however few there are. Where all weights are held, larger passes must not cost that, nor a live sequence.
    """
    live = min(max_sequences, job.sequences)
    least = power_of_two(max(LEAST_TOKENS, live))
    most = max(least, min(saturating(shape), power_of_two(useful(job, live))))
    smallest = draft(least)
    tokens = most
    while tokens > least and not _affordable(draft(tokens), smallest, budget):
        tokens //= 2
    return tokens


def saturating(shape: ModelShape) -> int:
    """Tokens from which every product of a pass, those with experts included, runs at its full rate."""
    spread = max(
        (layer.experts.count / layer.experts.per_token for layer in shape.layers if layer.experts), default=1.0
    )
    return power_of_two(max(DENSE_TOKENS, int(EXPERT_ROWS * spread)))


def useful(job: JobShape, live: int) -> int:
    """Tokens a pass that keep `live` sequences alive, and start them in few passes.

    In steady state, every token generated frees 1/length of a place, for which that share of a prompt is due. Lengths
    are known as limits only: twice the share allows for answers that end halfway.
    """
    return int(live * (1 + job.mean_prompt * max(2 / job.mean_generated, 1 / START_PASSES)))


def power_of_two(tokens: int) -> int:
    """The next one from `tokens` on."""
    return 1 << max(0, tokens - 1).bit_length()


def _affordable(larger: Draft, smallest: Draft, budget: int) -> bool:
    if smallest.smallest_whole <= budget:
        return larger.smallest_whole <= budget and larger.live(budget) == smallest.live(budget)
    return larger.smallest <= budget and larger.fixed - smallest.fixed <= SHARE * (budget - smallest.fixed)
