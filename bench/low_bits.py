"""What experts in few bits cost beside llama.cpp's formats of as many, on the same weights, text and calibration.

    python -m bench.make_real_mixture --out models/cut
    python -m bench.low_bits --mixture models/cut --llama-bin LLAMA_BIN

Matrices of routed experts alone are replaced, in transformers in float32, by what moedge's formats and llama.cpp's
(`ggml_quantize_chunk`) make of them. All are calibrated by a text that is not scored: moedge's as by `moedge prepare
--calibrate`, llama.cpp's by an importance matrix, the mean squares of what reaches a layer's experts and the second
matrix of each. Where rows are no multiple of 256 long, llama.cpp's blocks cross them, as if an expert were one row:
llama-quantize takes larger types there, which is why it is not asked. LLAMA_BIN has libggml-base.so.

Prints bits a weight, the error of what experts' first matrices make of that text (relative L2), perplexity, its rise
over unreplaced experts, and the divergence from these (KL, nats a token).
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.real_quality import CUT, calibration_text, chosen, head, line, perplexity
from moedge.quant.error_feedback import ErrorFeedback
from moedge.quant.formats.format import EXPERT_FORMATS, get_format
from moedge.quant.tensor import pack_into
from moedge.runtime.loading.prepare import calibrate
from moedge.runtime.settings.settings import Budgets
from moedge.runtime.source.model_source import open_source
from support.real.definition import Stock
from support.real.tables import loss
from support.real.text import WINDOW, windows

BLOCK = 256


class Inputs(NamedTuple):
    """What a text says of a matrix's inputs: mean squares, float32 [K]; of first matrices what errors move, too."""

    squares: Tensor
    feedback: ErrorFeedback | None = None


# What replaces a matrix [N, K] in float32.
Replace = Callable[[Tensor, Inputs], Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """What replaces experts' first matrices and their second ones; `bits` are those of a weight, in the mean."""

    title: str
    bits: float
    first: Replace
    second: Replace


class Ggml:
    """llama.cpp's own quantization: `types` of `replace` are names such as Q3_K."""

    def __init__(self, binaries: Path) -> None:
        self._library = ctypes.CDLL(str(binaries / "libggml-base.so"))
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        self._library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]

    def subject(self, first: str, second: str = "") -> Subject:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        second = second or first
        kinds = [GGMLQuantizationType[name] for name in (first, second)]
        for kind in kinds:
            self._library.ggml_quantize_init(int(kind))
        bits = [8 * nbytes / count for count, nbytes in (GGML_QUANT_SIZES[kind] for kind in kinds)]
        title = first if second == first else f"{first}, down {second}"
        one, other = (partial(self._replace, kind=kind) for kind in kinds)
        return Subject(f"llama.cpp {title}", mean_bits(*bits), one, other)

    def _replace(self, weight: Tensor, inputs: Inputs, kind: Any) -> Tensor:
        from gguf import GGML_QUANT_SIZES, dequantize

        count, nbytes = GGML_QUANT_SIZES[kind]
        blocks = weight.contiguous().numpy().reshape(-1, BLOCK)
        found, width = np.empty_like(blocks), weight.shape[1]
        # Blocks that begin in the same column have the same columns.
        phases = math.lcm(BLOCK, width) // BLOCK
        for phase in range(phases):
            importance = inputs.squares.numpy()[(phase * BLOCK + np.arange(BLOCK)) % width].copy()
            rows = blocks[phase::phases].copy()
            codes = np.empty((len(rows), BLOCK // count * nbytes), dtype=np.uint8)
            written = self._library.ggml_quantize_chunk(
                int(kind), rows.ctypes.data, codes.ctypes.data, 0, len(rows), BLOCK, importance.ctypes.data
            )
            if written != codes.nbytes:
                raise SystemExit(f"ggml_quantize_chunk wrote {written} bytes of {kind.name}, {codes.nbytes} wanted")
            found[phase::phases] = dequantize(codes, kind)
        return torch.from_numpy(found).view(weight.shape)


def of_moedge(first: str, second: str = "") -> Subject:
    """A format of moedge, or one for second matrices, too; packed from bfloat16, the dtype of the checkpoint."""

    def replace(weight: Tensor, inputs: Inputs, name: str) -> Tensor:
        layout = get_format(name).layout((weight.shape[0], weight.shape[1]), "bfloat16")
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        rounded, importance = weight.bfloat16(), inputs.squares
        if inputs.feedback is not None and name in EXPERT_FORMATS:
            rounded, importance = inputs.feedback.moved(rounded, layout), inputs.feedback.importance
        packed = pack_into(rounded, layout, buffer, importance=importance)
        return packed.dequantize(torch.empty(layout.shape))

    names = first, second or first
    bits = [8 * get_format(name).layout((BLOCK, 1 << 12), "bfloat16").nbytes / BLOCK / (1 << 12) for name in names]
    title = f"moedge {first}, down {second}" if second else f"moedge {first}"
    one, other = (partial(replace, name=name) for name in names)
    return Subject(title, mean_bits(*bits), one, other)


def mean_bits(first: float, second: float) -> float:
    """Of an expert's three matrices two are first ones."""
    return (2 * first + second) / 3


class Judge:
    """A mixture in transformers in float32, with its experts replaced or as they are."""

    def __init__(self, model: Path, num_windows: int) -> None:
        with open_source(str(model)) as source:
            self._importance = calibrate(source, calibration_text(), "bf16", Budgets())
        self._stock = Stock(model)
        self._definition = self._stock.define("none", "float", "fp32", "fp32")
        self._ids = windows(self._definition.encode, num_windows)
        self._exact = [self._definition.predict(each).float() for each in self._ids]

    def unreplaced(self) -> float:
        return perplexity(map(chosen, self._exact, self._ids))

    def ask(self, subject: Subject) -> tuple[float, float, float]:
        """The relative error of what first matrices make of the text, the perplexity, and the mean divergence from
        unreplaced experts."""
        squares = torch.zeros(2, dtype=torch.float64)
        before = {}
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for layer, first, parameter in self._experts():
                before[parameter] = parameter.data
                replace = subject.first if first else subject.second
                moments, down = self._importance.layers[layer]
                of_all = Inputs(moments.diagonal().contiguous(), ErrorFeedback.of(moments))
                inputs = [of_all if first else Inputs(each) for each in down]
                parameter.data = torch.stack(list(threads.map(replace, parameter.data, inputs)))
                if first:
                    old = before[parameter].double()
                    error = parameter.data - old
                    squares += torch.stack([_in_outputs(error, moments), _in_outputs(old, moments)])
        predicted = [self._definition.predict(each).float() for each in self._ids]
        for parameter, data in before.items():
            parameter.data = data
        apart = sum(float((p.double().exp() * (p - q)).sum()) for p, q in zip(self._exact, predicted, strict=True))
        found = perplexity(map(chosen, predicted, self._ids))
        return float((squares[0] / squares[1]).sqrt()), found, apart / sum(map(len, self._exact))

    def _experts(self) -> Iterator[tuple[int, bool, Any]]:
        """By layer: whether they are the first matrices, and those of all experts [E, N, K]."""
        for layer, module in enumerate(self._stock.model.model.layers):
            for name, parameter in module.named_parameters():
                if "experts" in name:
                    yield layer, "down" not in name, parameter


def _in_outputs(weights: Tensor, moments: Tensor) -> Tensor:
    """The sum of the mean squares of what matrices [E, N, K] make of inputs with these mean products."""
    return ((weights @ moments.double()) * weights).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixture", type=Path, required=True, help="a folder that bench.make_real_mixture wrote")
    parser.add_argument("--llama-bin", type=Path, help="where libggml-base.so lies; moedge alone without")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens")
    parser.add_argument(
        "--formats", nargs="+", default=["int4", "int3", "vq2"], help="moedge's, int3+int4 for second matrices in int4"
    )
    parser.add_argument("--types", nargs="+", default=["Q3_K", "Q3_K+Q4_K", "IQ3_S", "IQ2_S"], help="llama.cpp's")
    options = parser.parse_args()
    subjects = [of_moedge(*name.split("+")) for name in options.formats]
    if options.llama_bin:
        ggml = Ggml(options.llama_bin)
        subjects += [ggml.subject(*name.split("+")) for name in options.types]
    judge = Judge(options.mixture, options.windows)
    print(f"\n{CUT}; {options.windows} windows of {WINDOW} tokens\n", flush=True)
    head("experts", "bits", "relative error", "perplexity", "against none", "KL")
    line("none", 16, "", f"{judge.unreplaced():.4f}", "", "")
    for subject in subjects:
        error, found, apart = judge.ask(subject)
        rise = loss(found, judge.unreplaced())
        line(subject.title, f"{subject.bits:.2f}", f"{error:.3f}", f"{found:.4f}", rise, f"{apart:.3f}")


if __name__ == "__main__":
    main()
