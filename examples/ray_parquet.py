"""Answers a column of a Parquet file with Ray Data: python examples/ray_parquet.py [prompts.parquet] [answers]

Without arguments it makes a small file of prompts first. Needs moedge[ray].
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pyarrow
import pyarrow.parquet
import ray

from moedge.ray import BatchModel

MODEL = Path(__file__).parent / "tiny_moe" / "model"


def main(prompts: Path, answers: Path) -> None:
    ray.init(include_dashboard=False, log_to_driver=False)
    rows = ray.data.read_parquet(str(prompts))
    options = BatchModel.actor_options(MODEL, ram="2GiB", gpu_mem=0, rows=100, sampling={"max_tokens": 10})
    rows.map_batches(BatchModel, **options).write_parquet(str(answers))
    ray.shutdown()


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    given = [Path(each) for each in sys.argv[1:]]
    prompts = given[0] if given else folder / "prompts.parquet"
    answers = given[1] if len(given) > 1 else folder / "answers"
    if not given:
        pyarrow.parquet.write_table(
            pyarrow.table({"prompt": [f"In the beginning {row}" for row in range(20)]}), prompts
        )
    main(prompts, answers)
    found = pyarrow.parquet.read_table(answers).to_pylist()
    print(f"{len(found)} answers in {answers}; the first: {found[0]['generated_text']!r}")
