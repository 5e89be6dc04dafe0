"""The roof of a pass in memory: the matrix products of its layers alone, in bfloat16, by torch's own kernels.

Every expert gets the same number of rows, no row is gathered or weighed, and nothing is attended, normalised or
sampled. Products go either one after another with all threads, or experts side by side with one thread each; the
faster way counts.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from moedge.runtime.shape.model_shape import LayerShape, Matrix, ModelShape

REPEATS = 5


class BareLayer:
    """The matrices of one layer, at random, and products with them."""

    def __init__(self, layer: LayerShape) -> None:
        experts = layer.experts
        self.dense = [_weights(matrix) for matrix in layer.dense]
        self.experts = [(_weights(experts.up), _weights(experts.down)) for _ in range(experts.count)] if experts else []
        self.chosen = experts.per_token if experts else 0

    def multiply(self, tokens: int, threads: int, side_by_side: bool) -> None:
        for weight in self.dense:
            torch.mm(torch.zeros(tokens, weight.shape[1], dtype=weight.dtype), weight.t())
        if not self.experts:
            return
        rows = max(1, tokens * self.chosen // len(self.experts))
        inputs = [torch.zeros(rows, weight.shape[1], dtype=weight.dtype) for weight in self.experts[0]]

        def expert(index: int) -> None:
            for x, weight in zip(inputs, self.experts[index], strict=True):
                torch.mm(x, weight.t())

        if not side_by_side:
            for index in range(len(self.experts)):
                expert(index)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(expert, range(len(self.experts))))


def seconds(shape: ModelShape, tokens: int, threads: int) -> float:
    """Median time of the products of all layers for a pass of `tokens`; the output head is left out."""
    torch.set_num_threads(threads)
    kinds = {(layer.dense, layer.experts): layer for layer in shape.layers}
    counts = [sum(kind == (layer.dense, layer.experts) for layer in shape.layers) for kind in kinds]
    return sum(
        count * _seconds(BareLayer(one), tokens, threads) for one, count in zip(kinds.values(), counts, strict=True)
    )


def _seconds(layer: BareLayer, tokens: int, threads: int) -> float:
    best = []
    for side_by_side in (False, True):
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            layer.multiply(tokens, threads, side_by_side)
            times.append(time.perf_counter() - begun)
        best.append(statistics.median(times))
    return min(best)


def _weights(matrix: Matrix) -> Tensor:
    return torch.empty(matrix.rows, matrix.cols, dtype=torch.bfloat16).normal_(std=0.02)
