#!/usr/bin/env bash
# From a shape to a checked result: plan, generate, compile, inspect, then run one layer on the GPUs of this machine,
# or without one on the emulator. Sets up whatever is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

out=build/demo
layer=(--model tiny --max-tokens 256)
megagen() {
    echo
    echo "\$ megagen $*"
    "$PYTHON" -m megagen "$@"
}
has_command() {
    "$PYTHON" -m megagen "$1" --help >/dev/null 2>&1
}

megagen plan "${layer[@]}" --tokens 64
megagen generate "${layer[@]}" --tokens 64 --out "$out" --compile
megagen inspect "$out"

if nvidia-smi --list-gpus 2>/dev/null | grep -q GPU && has_command run; then
    megagen run "${layer[@]}" --tokens 64
elif has_command emulate; then
    megagen emulate "${layer[@]}" --tokens 7 --seed 0
else
    echo
    echo "No GPU here: the kernel in $out was planned, generated and compiled, but nothing was executed."
fi
