#!/usr/bin/env bash
# Write requirements-*.lock, the pins of requirements-*.txt with the hashes of their files
# (and for CUDA all that SGLang's own list brings). Needs uv, and the index it reads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

lock() {
  local name="$1"
  shift
  grep -v '^torch==.*+cpu' "requirements-$name.txt" |
    uv pip compile - --quiet --generate-hashes --no-annotate --strip-extras --upgrade \
      --default-index https://pypi.org/simple --python-version 3.11 \
      --python-platform x86_64-manylinux_2_34 \
      --custom-compile-command scripts/lock_requirements.sh \
      --output-file "requirements-$name.lock" "$@"
}

lock cpu --no-deps
lock test --no-deps
# cuda-tile's wheel is on NVIDIA's index only, and its metadata with it; it needs nothing
# but typing-extensions.
lock cuda --override <(echo "cuda-tile; sys_platform == 'never'")
echo "cuda-tile==1.6.0rc5" | uv pip compile - --quiet --generate-hashes --no-header \
  --no-annotate --no-deps --default-index https://pypi.org/simple >>requirements-cuda.lock
