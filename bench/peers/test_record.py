"""bench/peers/record.py: what is measured again and what is not, medians, roofs, and GGUF files for llama.cpp."""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open

from bench import compare, make_model
from bench.peers import gguf_files
from bench.peers import record as records

MODEL = {
    "name": "m", "numel": 1000, "dense_numel": 100, "experts_numel": 800, "head_numel": 50, "active_numel": 250,
    "kv_token_nbytes": 2,
}  # fmt: skip
HEAD: records.Record = {
    "title": "in memory", "model": MODEL, "machine": {"processor": "a processor", "cores": 2, "memory_bytes": 2**34},
    "ceiling": None, "cells": {"1": [1, 8, 33], "512": [512, 8, 4], "prompts": [32, 64, 2]},
    "counted": ["none", "int4"], "command": "python -m bench.compare",
}  # fmt: skip


def measured(title: str, cell: str, tok_s: float, **others: Any) -> records.Measurement:
    own = {"title": title, "cell": cell, "at": "2026-11-22T20:00:00", "cpu_share_of_others": 0.01, "verdict": "ok"}
    return {**own, "prompt": tok_s, "generated": tok_s, "read_bytes_s": 1e4, "flop_s": 1e5, **others}


def a_record(*measurements: records.Measurement) -> records.Record:
    return {**HEAD, "bits": {"moedge int4": 4.0, "moedge none": 16.0}, "measurements": list(measurements)}


def options(**others: Any) -> argparse.Namespace:
    found = compare.parser().parse_args(["--model", "m", "--llama-bin", "bin"])
    found.__dict__ |= {"ram": "auto", "gguf": ["m-Q4_0.gguf", "m-bf16.gguf"], **others}
    return found


def plan(record: records.Record, **others: Any) -> dict[str, dict[str, list[int]]]:
    return {contender.title: loads for contender, loads in compare.rounds(options(**others), record)}


def test_peers_are_tried_once_and_moedge_is_repeated() -> None:
    wanted = plan(a_record())
    assert wanted["moedge int4"] == {"1": [1, 8, 33, 3], "512": [512, 8, 4, 3], "prompts": [32, 64, 2, 3]}
    # 256 are the most sequences of llama.cpp, and -ub changes no pass of one token.
    assert wanted["llama.cpp m-Q4_0.gguf -fa on"]["512"] == [256, 8, 4, 1]
    assert set(wanted["llama.cpp m-Q4_0.gguf -fa on -ub 2048"]) == {"512", "prompts"}
    assert "llama.cpp m-bf16.gguf -fa on --no-repack" not in wanted
    assert list(plan(a_record(), ceiling="1GiB"))[-1] == "llama.cpp m-bf16.gguf -fa on --no-repack -kvu"


def test_what_is_recorded_is_not_measured_again_and_the_fastest_of_an_engine_is_repeated() -> None:
    others = {"moedge": ["int4"], "transformers": [], "gguf": ["m-Q4_0.gguf"], "llama_options": "-fa on;-fa off"}
    fast, slow = (f"llama.cpp m-Q4_0.gguf -fa {one}" for one in ("on", "off"))
    once = [measured(title, cell, speed) for title, speed in ((fast, 9.0), (slow, 8.0)) for cell in HEAD["cells"]]
    ours = [measured("moedge int4", cell, 5.0) for cell in HEAD["cells"] for _ in range(3)]
    record = a_record(*once, *ours[1:])
    assert plan(record, **others) == {
        "moedge int4": {"1": [1, 8, 33, 1]},
        fast: {cell: [*load[:2], load[2], 2] for cell, load in {**HEAD["cells"], "512": [256, 8, 4]}.items()},
    }
    killed = measured(fast, "1", 0.0, verdict="killed")
    assert "1" not in plan(a_record(killed, *once[1:], *ours), **others)[fast]
    records.forget(record, ["moedge"])
    assert set(plan(record, **others)["moedge int4"]) == set(HEAD["cells"])


@pytest.mark.parametrize("answers", [2, 1])
def test_an_engine_with_one_setting_is_repeated_once_even_if_that_fails(answers: int) -> None:
    record, asked = a_record(), []
    for contender, loads in compare.rounds(options(moedge=[], transformers=["eager"], gguf=[], products=False), record):
        asked.append({cell: load[-1] for cell, load in loads.items()})
        if len(asked) <= answers:
            record["measurements"] += [
                measured(contender.title, cell, 9.0) for cell, count in asked[-1].items() for _ in range(count)
            ]
    assert asked == [dict.fromkeys(HEAD["cells"], count) for count in (1, 2)]


def test_medians_roofs_and_ratios() -> None:
    ours = [measured("moedge int4", "1", speed, experts=0.125) for speed in (30.0, 10.0, 11.0)]
    record = a_record(*ours, measured("moedge int8", "1", 99.0), measured("llama.cpp x -fa on", "1", 22.0))
    assert records.figure(record, "moedge int4", "1") == 11.0
    # 100 dense, an eighth of 800 in experts and 50 in the head, half a byte each, and 8 tokens of 2 bytes of KV cache.
    above = records.roof(record, "moedge int4", "1")
    assert above == pytest.approx((1e4 / (250 / 2 + 16), 1e5 / 500))
    best = records.best_table(record).splitlines()
    assert best[2] == "| 1 | 11.0 (int4) | 22.0* (llama.cpp x -fa on) | 0.50 | 70.9 | 200 | 16% |"
    assert best[3] == "| 512 | - | - | - | - | - | - |"
    assert (
        records.all_table(record).splitlines()[2].startswith("| moedge int4 | 11.0 (16%) | - | - | 0 | 1% | 2026-11-22")
    )
    assert records.roof(record, "llama.cpp x -fa on", "1") is None


def test_prompts_do_not_meet_the_output_head() -> None:
    record = a_record(measured("moedge none", "prompts", 100.0, experts=1.0))
    assert records.roof(record, "moedge none", "prompts") == pytest.approx((2048 * 1e4 / (950 * 2), 1e5 / 400))


def test_a_record_continues_only_with_the_same_cells(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    records.save(a_record(measured("moedge int4", "1", 3.0)), path)
    found = records.load(path, {**HEAD, "command": "another"})
    assert (len(found["measurements"]), found["command"]) == (1, "another")
    assert found["contenders"][0]["tokens_per_second"]["1"]["generated"] == 3.0
    with pytest.raises(SystemExit, match="name another file"):
        records.load(path, {**HEAD, "ceiling": "1GiB"})
    assert records.load(tmp_path / "none.json", HEAD)["measurements"] == []


def test_a_killed_process_is_recorded_cell_by_cell() -> None:
    record = a_record()
    timing = {"cell": "1", "prompt_tok_s": 2.0, "decode_tok_s": 1.0, "others": 0.0, "experts": None}
    row = compare.Row("llama.cpp x", others=0.0, verdict="killed", timings=[timing])
    compare.add(record, row, {"1": [1, 8, 33, 1], "512": [512, 8, 4, 1]}, {"read_bytes_s": 1.0, "flop_s": 2.0})
    assert [(one["cell"], one["verdict"]) for one in record["measurements"]] == [("1", "ok"), ("512", "killed")]
    assert record["measurements"][0]["read_bytes_s"] == 1.0
    assert "killed" in records.all_table(record)


def test_a_gguf_file_has_the_checkpoints_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_model", "--shape", "toy", "--out", str(tmp_path / "toy")])
    make_model.main()
    file = gguf_files.gguf_of(tmp_path / "toy", "bf16", tmp_path)
    assert file.name == "toy-bf16.gguf"
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    index = json.loads((tmp_path / "toy" / "model.safetensors.index.json").read_text())["weight_map"]
    experts, router = found["blk.1.ffn_up_exps.weight"], found["blk.1.ffn_gate_inp.weight"]
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    with safe_open(tmp_path / "toy" / index[name.format(0)], framework="pt") as shards:
        wanted = torch.stack([shards.get_tensor(name.format(one)) for one in range(16)])
        assert torch.equal(
            torch.from_numpy(router.data.copy()), shards.get_tensor("model.layers.1.mlp.gate.weight").float()
        )
    assert torch.equal(torch.from_numpy(experts.data.copy()).view(torch.bfloat16).view(wanted.shape), wanted)
    assert len(found) == 3 + 2 * 12
