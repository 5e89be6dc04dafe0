"""One piece of the engine by itself: matrix products, attention, packing, reads, the pass around the model.

python -m bench.micro SUBJECT --help
"""

from __future__ import annotations

import argparse
import importlib

SUBJECTS = {
    "attention": "decode attention on a CPU, by KV format",
    "beside": "experts that a CPU computes beside copies to a device, by format and rows",
    "linear": "products with packed matrices, by rows and format",
    "pack": "packing of matrices against bitsandbytes, and the error of each format",
    "reads": "the stream's reader threads against the disk",
    "rows": "what kernels on codes compute a second, by number of rows",
    "step": "what a pass costs outside the model",
    "table": "rows looked up in a table on the disk against bare reads",
    "widen": "widening and packing of quantized checkpoints' weights, by type",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="subjects:\n" + "\n".join(f"  {name:12}{about}" for name, about in SUBJECTS.items()),
    )  # fmt: skip
    parser.add_argument("subject", choices=SUBJECTS, metavar="SUBJECT")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the subject")
    chosen = parser.parse_args()
    subject = importlib.import_module(f"bench.subjects.{chosen.subject}")
    options = argparse.ArgumentParser(
        prog=f"bench.micro {chosen.subject}", description=subject.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    subject.add_options(options)
    subject.run(options.parse_args(chosen.rest))


if __name__ == "__main__":
    main()
