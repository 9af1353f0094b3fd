#!/usr/bin/env bash
# Writes generated/ again, after a change of templates or planning; a test compares it with what is rendered.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

generate() { "$PYTHON" -m megagen generate --out generated "$@"; }
generate --model deepseek-v4-flash --ranks 8 --max-tokens 4096 --tokens 4096
generate --model qwen3-30b-a3b --ranks 1 --max-tokens 4096 --tokens 4096
generate --model tiny --ranks 2 --max-tokens 256 --tokens 32,256 # tokens on N, and on M and N
generate --model deepseek-v4-flash --arch sm100 --ranks 8 --max-tokens 4096 --tokens 4096
generate --model deepseek-v4-pro --arch sm100 --ranks 8 --max-tokens 4096 --tokens 4096
