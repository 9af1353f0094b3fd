#!/usr/bin/env bash
# All GPU tests: compiles their kernels beforehand on all cores, and writes the counts as JSON into the folder
# that is the first argument. Further arguments go to pytest.
set -euo pipefail
results=${1:?give a folder for the results}
shift
cd "$(dirname "$0")/../.."
PYTHONPATH=. python tests/gpu/warm_cache.py
exec python -m pytest -q -m gpu tests/gpu --gpu-results "$results" "$@"
