#!/usr/bin/env bash
# Lint, types and tests, after setting up whatever is missing. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh test

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest -n 2 -m "not gpu" "$@"

# One process: the tests of a GPU want it for themselves.
if [[ $(nvidia-smi --list-gpus 2>/dev/null) == *GPU* ]]; then
    "$PYTHON" -m pytest -m gpu "$@"
fi
