"""Converts a checkpoint with llama.cpp's converter, which PYTHONPATH names: CHECKPOINT FILE TYPE [fused].

The vocabulary is written here, because the converter knows published ones alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

checkpoint, file, kind, *options = sys.argv[1:]


def read_config(folder: Path, is_mistral_format: bool) -> Any:
    """As it was published: transformers renames some of its values."""
    return json.loads((folder / "converted.json").read_text())


def write_vocabulary(model: Any) -> None:
    content = json.loads((Path(checkpoint) / "tokenizer.json").read_text())
    vocabulary, writer = content["model"]["vocab"], model.gguf_writer
    special = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["</s>"])
    writer.add_pad_token_id(vocabulary["<pad>"])


ModelBase.load_hparams = staticmethod(read_config)
config = read_config(Path(checkpoint), False)
converter = get_model_class(get_model_architecture(config, ModelType.TEXT))
converter.set_vocab = write_vocabulary
converter.no_mtp = not config.get("mtp_num_hidden_layers") and not config.get("num_nextn_predict_layers")
with torch.inference_mode():
    # Some classes read the file themselves unless they are given what it says.
    converter(
        Path(checkpoint), gguf.LlamaFileType[kind], Path(file), hparams=config, fuse_gate_up_exps="fused" in options
    ).write()
