"""Tiny quantized checkpoints: written by the formats' own libraries, or word by word by their published layouts.

Each writer gives the tensors of one weight by suffix, and the float32 matrix that the format's own library, or the
definition of the format, makes of them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moedge.runtime.shape.read import is_router
from support.tiny_families import save_tiny

# Suffixes replace ".weight"; a writer of stacked experts gets [E, N, K].
Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 4,
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def fp8_blocks(weight: Tensor, block: tuple[int, int] = (64, 64), scale_fmt: str = "float") -> Written:
    """By transformers' operations."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Quantizer:
        class quantization_config:
            weight_block_size = block

    Quantizer.quantization_config.scale_fmt = scale_fmt
    tensors = Fp8Quantize(Quantizer()).convert({"x.weight": weight})
    scale = tensors["x.weight_scale_inv"]
    codes = tensors["x.weight"]
    wide = Fp8Dequantize(Quantizer())._dequantize_one(codes, scale.float(), torch.float32)
    return {".weight": codes, ".weight_scale_inv": scale}, wide


def mxfp8(weight: Tensor) -> Written:
    tensors, wide = fp8_blocks(weight, (1, 32), "ue8m0")
    return {**tensors, ".weight_scale_inv": tensors[".weight_scale_inv"].view(torch.uint8)}, wide


def fp8_rows(weight: Tensor) -> Written:
    """As fbgemm does: a scale for each row, and the bound of activations' scales."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale": scale, ".input_scale_ub": torch.tensor([1200.0])}
    return tensors, codes.float() * scale


def bnb_8bit(weight: Tensor) -> Written:
    scale = weight.abs().amax(1)
    codes = (weight / scale[:, None] * 127).round().to(torch.int8)
    tensors = {".weight": codes, ".SCB": scale, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * scale[:, None] / 127


def bnb_4bit(weight: Tensor, levels: str = "nf4", nested: bool = True) -> Written:
    """By bitsandbytes."""
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=levels, compress_statistics=nested)
    tensors = {f".weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return {".weight": codes, **tensors}, bnb.dequantize_4bit(codes, state).float()


def compressed(weight: Tensor, form: str, scales: torch.dtype | None = None, **scheme: Any) -> Written:
    """By compressed-tensors' compressors; the float32 arithmetic is its own `dequantize`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**scheme)
    rows, columns = weight.shape
    group = args.group_size or columns
    whole = None
    if args.strategy == "block":
        height, width = args.block_structure
        groups = weight.view(rows // height, height, columns // width, width).transpose(1, 2).flatten(2)
    else:
        groups = weight.view(rows, -1, group)
    if form.startswith("nvfp4"):
        whole = (448 * 6 / weight.abs().max()).float().view(1)
    scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args, global_scale=whole)
    if scales is not None:
        scale = scale.to(scales)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    if whole is not None:
        state["weight_global_scale"] = whole
    if args.symmetric:
        del state["weight_zero_point"]
    packed = BaseCompressor.get_value_from_registry(form).compress(
        state, QuantizationScheme(targets=["Linear"], weights=args)
    )
    codes = quantize(weight, scale, None if args.symmetric else state["weight_zero_point"], args, global_scale=whole)
    if form.endswith("fp4-pack-quantized"):
        # Scales are rounded when they are packed.
        stored = packed["weight_scale"]
        scale = decompress_mx_scale(stored) if stored.dtype == torch.uint8 else stored
    wide = dequantize(
        codes, scale.float(), None if args.symmetric else zero.float(), args, dtype=torch.float32, global_scale=whole
    )
    return {f".{name}": value for name, value in packed.items()}, wide


def mxfp4_blocks(weight: Tensor) -> Written:
    """Random valid blocks of gpt-oss [E, N, K / 32, 16], and what transformers makes of them: [E, K, N]."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    count, rows, columns = weight.shape
    generator = torch.Generator().manual_seed(columns)
    blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 126, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
    wide = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"_blocks": blocks, "_scales": scales}, wide


def words(codes: Tensor, bits: int, axis: int) -> Tensor:
    """Codes in int32 words along an axis: a stream of bits from the lowest on, as AutoGPTQ's loops write it."""
    codes = codes.movedim(axis, -1)
    count, rows = codes.shape[-1], codes.reshape(-1, codes.shape[-1]).tolist()
    packed = []
    for row in rows:
        stream = sum(int(code) << (index * bits) for index, code in enumerate(row))
        packed.append([(stream >> (32 * word)) & 0xFFFFFFFF for word in range(-(-count * bits // 32))])
    made = torch.tensor(packed, dtype=torch.int64).to(torch.int32)
    return made.view(*codes.shape[:-1], -1).movedim(-1, axis).contiguous()


# What GPTQModel takes from whole words of zero points in version 1, by bits (convert_gptq_v2_to_v1_format_module).
GPTQ_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def gptq(
    weight: Tensor, bits: int = 4, group: int = 32, version: int = 1, act_order: bool = False, least_zero: int = 1
) -> Written:
    """By hand: qweight along K, qzeros along N, less one in version 1, and g_idx.

    With a `least_zero` of 0 half of the rows have no negative weights, so that their zero points are 0.
    """
    if not least_zero:
        weight = torch.where(torch.arange(len(weight))[:, None] % 3 == 0, weight, weight.abs())
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(rows * columns)
    order = torch.arange(columns) // group
    if act_order:
        order = order[torch.randperm(columns, generator=generator)]
    groups, most = columns // group, (1 << bits) - 1
    scale, zero = torch.empty(groups, rows), torch.empty(groups, rows)
    for index in range(groups):
        part = weight[:, order == index]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale[index] = ((high - low) / most).half().float()
        zero[index] = (-low / scale[index]).round().clamp(least_zero, most)
    codes = (weight / scale[order].t() + zero[order].t()).round().clamp(0, most)
    stored = words(zero, bits, 1)
    if version == 1:
        # Wrapping, as int32 words do; 3 bits never have a zero point of 0 here.
        stored = stored - GPTQ_ONES[bits] if bits in GPTQ_ONES else words(zero - 1, bits, 1)
    tensors = {
        ".qweight": words(codes.t(), bits, 0),
        ".qzeros": stored,
        ".scales": scale.half(),
        ".g_idx": order.to(torch.int32),
    }
    return tensors, (codes - zero[order].t()) * scale[order].t()


def awq(weight: Tensor, group: int = 32) -> Written:
    """By hand: AutoAWQ's GEMM layout, eight outputs in a word, in the order 0 2 4 6 1 3 5 7."""
    tensors, wide = gptq(weight, 4, group, version=2)
    rows = len(weight)
    scale = tensors[".scales"].float().repeat_interleave(group, 0)
    zero = _stream(tensors[".qzeros"], rows)
    codes = (wide.t() / scale).round() + zero.repeat_interleave(group, 0)
    order = torch.tensor(AWQ_ORDER)

    def packed(values: Tensor) -> Tensor:
        return words(values.view(len(values), -1, 8)[:, :, order].flatten(1), 4, 1)

    return {".qweight": packed(codes), ".qzeros": packed(zero), ".scales": tensors[".scales"]}, wide


def _stream(packed: Tensor, count: int) -> Tensor:
    return torch.stack([(packed >> (4 * index)) & 15 for index in range(8)], -1).flatten(1)[:, :count]


def ct_config(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": None}}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": groups, "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None,
    }  # fmt: skip


def _ct(form: str, scales: torch.dtype | None = None, **weights: Any) -> tuple[Writer, dict[str, Any]]:
    return lambda weight: compressed(weight, form, scales, **weights), ct_config(form, **weights)


def _int(bits: int, group: int, scales: torch.dtype, symmetric: bool = True) -> tuple[Writer, dict[str, Any]]:
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    return _ct("pack-quantized", scales, **scheme)


def _gptq_config(bits: int = 4, group: int = 32, form: str = "gptq", **more: Any) -> dict[str, Any]:
    sizes = {"bits": bits, "group_size": group, "checkpoint_format": form}
    return {"quant_method": "gptq", "sym": False, "desc_act": False, **sizes, **more}


def mixed(weight: Tensor, experts: bool = True) -> Written:
    """Experts in int4 and attention in fp8, as in Kimi K2."""
    if experts:
        return _int(4, 32, torch.bfloat16)[0](weight)
    return compressed(weight, "float-quantized", None, num_bits=8, type="float", symmetric=True, strategy="channel")


def _mixed_config() -> dict[str, Any]:
    first = _int(4, 32, torch.bfloat16)[1]["config_groups"]["group_0"]
    second = ct_config("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
    groups = {"experts": {**first, "targets": ["re:.*experts.*"]}, "others": second["config_groups"]["group_0"]}
    return {**second, "format": "mixed-precision", "config_groups": groups}


_BNB = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
# By name: the writer of a weight, and the quantization_config.
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8 blocks": (fp8_blocks, {**_FP8, "weight_block_size": [64, 64]}),
    "mxfp8": (mxfp8, {**_FP8, "quant_method": "mxfp8", "scale_fmt": "ue8m0"}),
    "fbgemm": (fp8_rows, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}),
    "bnb int8": (bnb_8bit, {**_BNB, "load_in_8bit": True, "load_in_4bit": False, "_load_in_8bit": True}),
    "bnb nf4": (
        bnb_4bit,
        {**_BNB, "load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True},
    ),
    "bnb fp4 single": (
        lambda weight: bnb_4bit(weight, "fp4", False), {**_BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    ),
    "ct int4 g32": _ct("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
    "ct int4 g64 asym": _ct("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=64),
    "ct int8 g128": _ct("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="group", group_size=128),
    "ct int4 g32 bf16": _int(4, 32, torch.bfloat16),
    "ct int4 g64 fp16 asym": _int(4, 64, torch.float16, False),
    "ct int8 g128 bf16": _int(8, 128, torch.bfloat16),
    "ct int3 channel": _ct("pack-quantized", num_bits=3, type="int", symmetric=True, strategy="channel"),
    "ct int8 rows": _ct("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    "ct fp8 rows": _ct("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
    "ct fp8 blocks": _ct(
        "float-quantized", num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[64, 64]
    ),
    "ct mixed": (mixed, _mixed_config()),
    "ct nvfp4": _ct("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "ct mxfp4": _ct("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "gptq v1": (gptq, _gptq_config()),
    "gptq v1 act order": (lambda weight: gptq(weight, act_order=True), _gptq_config(desc_act=True)),
    "gptq v2 g128": (lambda weight: gptq(weight, 4, 128, 2), _gptq_config(group=128, form="gptq_v2")),
    "gptq 3 bits": (lambda weight: gptq(weight, 3), _gptq_config(bits=3)),
    "gptq 8 bits": (lambda weight: gptq(weight, 8), _gptq_config(bits=8)),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
}  # fmt: skip


def is_quantized(name: str, tensor: Tensor) -> bool:
    return ".layers." in name and tensor.dim() == 2 and name.endswith(".weight") and not is_router(name)


def write_quantized(form: str, folder: Path, wide: Path, family: str = "qwen3_moe") -> None:
    """Writes a family's tiny checkpoint into `folder`, quantized, and into `wide` the same weights in float32."""
    writer, config = FORMATS[form] if form != "mxfp4" else (mxfp4_blocks, {"quant_method": "mxfp4"})
    save_tiny(family, wide, **SIZES)
    floats = load_file(wide / "model.safetensors")
    made: dict[str, Tensor] = {}
    for name, tensor in list(floats.items()):
        if form == "mxfp4" and tensor.dim() == 3:
            tensors, floats[name] = writer(tensor.transpose(1, 2))
            made |= {f"{name}{suffix}": value.contiguous() for suffix, value in tensors.items()}
        elif form != "mxfp4" and is_quantized(name, tensor):
            tensors, floats[name] = mixed(tensor, "experts" in name) if writer is mixed else writer(tensor)
            made |= {name.removesuffix(".weight") + suffix: value.contiguous() for suffix, value in tensors.items()}
        else:
            made[name] = tensor
    if writer is mixed:
        # Scales of a cache in fp8, which is another one than ours.
        made["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])
    folder.mkdir()
    for path in wide.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    values = json.loads((wide / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    save_file(made, folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, wide / "model.safetensors")
