"""Takes SmolLM2's weights off the 4-bit grid that they come on, and keeps a model that computes the same.

    python -m bench.rotate [--seed 0]      writes a checkpoint in bf16 into the user's cache folder, and prints where

The residual stream is turned by a random orthogonal matrix, and the weights of the norms become part of the matrices
behind them, which changes no logit (SliceGPT, Ashkboos et al. 2024): each matrix that is quantized has its inputs or
its outputs mixed, so that its weights lie on no grid. A rotation also spreads what few columns had to themselves
(QuaRot), so losses of 4 bits measured on it are those of weights without outliers. The embedding and the head are two
matrices, which were one.
"""

from __future__ import annotations

import argparse

from support.real.rotation import SEED, rotated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    print(rotated(parser.parse_args().seed))


if __name__ == "__main__":
    main()
