#!/usr/bin/env bash
# Everything that a GPU must show, part by part, into one JSON; without one the checks run on the fake device.
#
#   bench/gpu.sh hour                       first of all: rates, where passes spend their time, kernels, tokens
#   bench/gpu.sh checks                     what there is, its rates, and the engine's tokens on one to three tiers
#   bench/gpu.sh kernels                    every Triton kernel against float64, and its time against its floor
#   bench/gpu.sh races                      streamed places poisoned, compute held up; compute-sanitizer
#   bench/gpu.sh budgets                    4 to 24 GiB held, as the driver counts; sequences by KV format
#   bench/gpu.sh qwen3                      also mixtral, gpt-oss: tokens/s with random weights in the real shape,
#                                           against the roofline; qwen3 also against accelerate's offload
#   bench/gpu.sh jobs --models FOLDER       `moedge batch` with models of 0.5 to 31 GB within small device budgets
#   bench/gpu.sh all --out gpu.json         every part; what the file has already is not run again (--again)
#
# A part begins no step after eight minutes: call it again for the others.
# Needs torch, transformers and bitsandbytes; moedge itself may be this folder alone.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("moedge") is None)'; then
    mkdir -p .links/moedge
    for floor in quant offload moe runtime apps cli; do ln -sfn "../../$floor" ".links/moedge/$floor"; done
    ln -sfn ../../examples/tiny_moe .links/moedge/demo
    for file in api/*.py; do ln -sfn "../../$file" .links/moedge/; done
    # Its version is read from the metadata of a package.
    metadata=.links/moedge-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml).dist-info
    mkdir -p "$metadata"
    printf 'Metadata-Version: 2.1\nName: moedge\nVersion: %s\n' "$(basename "${metadata#*moedge-}" .dist-info)" \
        > "$metadata/METADATA"
    export PYTHONPATH="$PWD/.links${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1
exec "$python" -m bench.gpu "$@"
