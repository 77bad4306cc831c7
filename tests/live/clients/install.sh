#!/usr/bin/env bash
# Clients of other projects in an environment of their own: .venv-clients beside .venv. Done once per requirements/clients.txt
# and package-lock.json.
set -euo pipefail
cd "$(dirname "$0")/../../.."

env=.venv-clients
stamp=$env/.installed
packages=tests/live/clients

if ! cat requirements/clients.txt $packages/package-lock.json | cmp --silent - "$stamp"; then
  rm -rf "$env"
  .venv/bin/uv venv --quiet --python .venv/bin/python "$env"
  .venv/bin/uv pip install --quiet --python "$env/bin/python" --require-hashes -r requirements/clients.txt
  mkdir "$env/npm"
  cp $packages/package.json $packages/package-lock.json "$env/npm/"
  PATH="$PWD/$env/bin:$PATH" npm ci --prefix "$env/npm" --silent --ignore-scripts --no-audit --no-fund
  cat requirements/clients.txt $packages/package-lock.json >"$stamp"
fi
