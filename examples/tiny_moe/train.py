"""Trains the demo model on a Debian package's text and writes it with its tokenizer and its log.

Run as `python examples/tiny_moe/train.py --out examples/tiny_moe/model`.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from transformers.utils.logging import disable_progress_bar

import report
from chats import ChatWriter
from corpus import Split, fetch_chapters, running_text, split
from optimizer import MixedOptimizer
from tokenizer import END_OF_TEXT, TURN_END, train_tokenizer
from windows import IGNORED, Batch, ChatRows, Windows

SEED = 1611
CONTEXT = 2048
VOCAB_SIZE = 3072
TOKENS_PER_PASS = 4096
SHORT_WINDOW = 512
# The last part of the time is spent on windows of the whole context.
LONG_FROM = 0.75
WARM_UP = 0.02
MATRIX_RATE = 0.02
OTHER_RATE = 0.004
DECAY = 0.1
BALANCE = 0.01
NUM_CHECKS = 10


@dataclass(frozen=True)
class Texts:
    """What the model learns from, is watched on and is measured on, as token ids [n]."""

    windows: Windows
    watched: Tensor
    held_out: Tensor


@dataclass
class Run:
    """How far a training run has come: its clock, its passes and the watched perplexities."""

    seconds: float
    start: float = field(default_factory=time.monotonic)
    num_passes: int = 0
    watched: list[dict[str, float]] = field(default_factory=list)

    @property
    def progress(self) -> float:
        """The share of the time that is over, from 0 to 1."""
        return min(1.0, (time.monotonic() - self.start) / self.seconds)

    @property
    def is_check_due(self) -> bool:
        """Whether another tenth of the time is over since the last check."""
        return self.progress * NUM_CHECKS >= len(self.watched) + 1

    @property
    def is_best(self) -> bool:
        """Whether the last check found the lowest perplexity so far."""
        return self.watched[-1]["perplexity"] <= min(check["perplexity"] for check in self.watched)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """The demo's shape: 5 layers of 16 experts, 5.7 million parameters."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """Random weights in bfloat16, with generation settings that end at either end token."""
    torch.manual_seed(SEED)
    model = Qwen3MoeForCausalLM(model_config(tokenizer)).to(torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    ends = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=ends[1], do_sample=True, temperature=0.7, top_p=0.9
    )
    return model


def read_texts(parts: Split, tokenizer: PreTrainedTokenizerFast) -> Texts:
    """Tokenizes the parts; the training part also feeds the chat samples."""
    books = groupby(parts.training, key=lambda chapter: chapter.book)
    training = END_OF_TEXT.join(running_text(chapters) for _, chapters in books)
    ids, watched, held_out = (
        torch.tensor(tokenizer(text, verbose=False).input_ids)
        for text in (training, running_text(parts.watched), running_text(parts.held_out))
    )
    chats = ChatRows(ChatWriter(parts.training, SEED), tokenizer)
    return Texts(Windows(ids, chats, SEED), watched, held_out)


def learning_rate(progress: float) -> float:
    """The share of the full rate: linear warm-up, then half a cosine down to zero."""
    return min(1.0, (progress + 1e-3) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * progress))


def compile_parts(model: Qwen3MoeForCausalLM) -> None:
    """Fuses the parts made of many small operations, which halves the time of a pass.

    Not the whole model: the stock model records its router logits by hooks, which a graph would cut.
    """
    for layer in model.model.layers:
        for part in (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp.experts):
            part.compile(dynamic=False)
    model.model.norm.compile(dynamic=False)


# The number of learned tokens differs from batch to batch.
@torch.compile(dynamic=True)
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of [n, vocab_size] at [n], in float32."""
    return F.cross_entropy(logits.float(), targets)


def batch_loss(model: Qwen3MoeForCausalLM, batch: Batch) -> Tensor:
    """Cross entropy at the labels to be learned, plus the balance loss."""
    out = model.model(input_ids=batch.ids, use_cache=False, output_router_logits=True)
    targets = batch.labels[:, 1:]
    learned = targets != IGNORED
    logits = model.lm_head(out.last_hidden_state[:, :-1][learned])
    return cross_entropy(logits, targets[learned]) + BALANCE * balance_loss(model, out.router_logits)


def balance_loss(model: Qwen3MoeForCausalLM, router_logits: tuple[Tensor, ...]) -> Tensor:
    """The Switch balance loss layer by layer.

    The stock loss sums the layers first, so that one layer's idle expert hides behind another's busy one.
    """
    num_experts, experts_per_token = model.config.num_experts, model.config.num_experts_per_tok
    losses = [load_balancing_loss_func((logits,), num_experts, experts_per_token) for logits in router_logits]
    return torch.stack(losses).mean()


def train(model: Qwen3MoeForCausalLM, texts: Texts, minutes: float, save: Path) -> Run:
    """Trains until the time is over; whenever the watched perplexity is the lowest yet, saves the model."""
    compile_parts(model)
    optimizer = MixedOptimizer(model.named_parameters(), DECAY)
    run = Run(minutes * 60)
    while len(run.watched) < NUM_CHECKS:
        progress = run.progress
        window = SHORT_WINDOW if progress < LONG_FROM else CONTEXT
        loss = batch_loss(model, texts.windows.batch(TOKENS_PER_PASS // window, window))
        torch.autograd.backward(loss)
        share = learning_rate(progress)
        optimizer.update(MATRIX_RATE * share, OTHER_RATE * share)
        run.num_passes += 1
        if run.is_check_due:
            check(model, texts, run, save)
    return run


def check(model: Qwen3MoeForCausalLM, texts: Texts, run: Run, save: Path) -> None:
    """Measures the watched perplexity, prints it and saves the model if it is the best yet."""
    with torch.compiler.set_stance("force_eager"):
        watched = round(report.perplexity(model, texts.watched, SHORT_WINDOW), 2)
    run.watched.append({"passes": run.num_passes, "perplexity": watched})
    elapsed = (time.monotonic() - run.start) / 60
    print(f"{elapsed:5.1f} min, pass {run.num_passes}: watched perplexity {watched}", flush=True)
    if run.is_best:
        model.save_pretrained(save)


def measure(folder: Path, texts: Texts, run: Run) -> dict[str, object]:
    """Measures the saved model as others will load it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "training": {"minutes": round(run.seconds / 60, 1), "passes": run.num_passes, "watched": run.watched},
        "held_out_tokens": len(texts.held_out),
        "held_out_perplexity": {
            str(window): round(report.perplexity(model, texts.held_out, window), 3)
            for window in (128, SHORT_WINDOW, CONTEXT)
        },
        "routing": [asdict(layer) for layer in report.routing(model, texts.held_out, CONTEXT)],
        "answers": report.answers(model, tokenizer),
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=here / "model", help="folder of the model")
    parser.add_argument("--log", type=Path, default=here / "log.json", help="file of the measurements")
    parser.add_argument("--held-out", type=Path, default=here / "heldout.txt", help="file of the held-out text")
    parser.add_argument("--minutes", type=float, default=35.0, help="training time")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    return parser.parse_args()


def main() -> None:
    """Fetches, tokenizes, trains, saves, measures."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    parts = split(fetch_chapters())
    tokenizer = train_tokenizer([chapter.text for chapter in parts.training], VOCAB_SIZE, CONTEXT)
    texts = read_texts(parts, tokenizer)
    model = new_model(tokenizer)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(arguments.out)
    arguments.held_out.write_text(running_text(parts.held_out), encoding="utf-8")
    run = train(model, texts, arguments.minutes, arguments.out)
    log = measure(arguments.out, texts, run)
    arguments.log.write_text(json.dumps(log, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
