#!/usr/bin/env bash
# From a shape to a checked result: plan, generate, compile, inspect, then run one layer on a GPU of this machine, or
# on the emulator where no kernel can run. Sets up whatever is missing.
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
megagen plan "${layer[@]}" --tokens 64
megagen generate "${layer[@]}" --tokens 64 --out "$out" --compile
megagen inspect "$out"

if megagen doctor; then
    megagen run "${layer[@]}" --tokens 64
else
    megagen emulate "${layer[@]}" --ranks 2 --tokens 64,7 --sms 4 --seed 0 --timeline "$out/timeline.json"
    echo "What each role did and waited for: open $out/timeline.json in https://ui.perfetto.dev"
fi
