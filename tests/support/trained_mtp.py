"""A tiny mixture with an MTP head that was trained with it, on the begin of the license: most that it drafts is right.

    python -m support.trained_mtp FOLDER

Half a minute on a core. The loss of the head (arXiv:2412.19437, section 2.2) is also taken of what it drafts from its
own states, twice, since passes draft so.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from moedge.runtime.text.tokenizer import Tokenizer
from support.tiny_families import build_model, build_tokenizer
from support.tiny_mtp import LAYERS, Reference, write_head

LICENSE = Path(__file__).parents[2] / "LICENSE"
# Bytes of text, of a window, and windows of a step.
TEXT, WINDOW, WINDOWS = 500, 64, 8
STEPS, DEPTH = 500, 3
# As DeepSeek-V3's head was in the beginning, for each of its tokens.
SHARE = 0.3


def text() -> str:
    return LICENSE.read_text()[:TEXT]


def losses(reference: Reference, tokens: torch.Tensor) -> torch.Tensor:
    """Of the model, then of the head's first, second and third token; tokens [B, T]."""
    hidden, found = reference.states(tokens), []
    for depth in range(DEPTH + 1):
        if depth:
            hidden = reference.predict(tokens[:, depth:], hidden[:, : tokens.shape[1] - depth])
        logits = reference.model.lm_head(hidden[:, :-1])
        found.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, depth + 1 :].flatten()))
    return torch.stack(found)


def train(folder: Path, steps: int = STEPS) -> list[float]:
    """Writes the checkpoint; returns its last losses."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    model = build_model("glm4_moe", num_hidden_layers=LAYERS + 1)
    build_tokenizer(folder, model.config.vocab_size)
    with Tokenizer.load(folder) as tokenizer:
        ids = torch.tensor(tokenizer.encode(text()))
    reference = Reference(model.train())
    optimizer = torch.optim.AdamW(reference.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    found = torch.zeros(1)
    for step in range(steps):
        begins = torch.randint(len(ids) - WINDOW, (WINDOWS,))
        found = losses(reference, torch.stack([ids[begin : begin + WINDOW] for begin in begins]))
        optimizer.zero_grad()
        (found[0] + SHARE * found[1:].sum()).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(step, [round(each, 2) for each in found.tolist()], file=sys.stderr)
    model.save_pretrained(folder)
    write_head(folder, model.config.hidden_size, {name: each.weight.detach() for name, each in reference.own().items()})
    return found.tolist()


if __name__ == "__main__":
    print(train(Path(sys.argv[1])))
