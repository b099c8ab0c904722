#!/usr/bin/env bash
# Write KIT, an archive of what requirements-gpu-host.txt names, for
# scripts/gpu/run.py install --kit KIT on a host without network.
#
#   scripts/gpu/carry.sh KIT.tar.xz     about 800 MB are downloaded, 52 MB are written
set -euo pipefail

(($# == 1)) || { sed -n 2,5p "$0" | cut -c3- >&2; exit 2; }
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
platforms=(--platform any --platform linux_x86_64)
for libc in 39 35 34 31 28 27 26 24 17; do
  platforms+=(--platform "manylinux_2_${libc}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
python3 -m pip install -q --no-deps --no-compile --only-binary=:all: \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" --target "$site" -r "$here/../requirements-gpu-host.txt"
python3 "$here/slim_kit.py" "$site"
strip "$site"/xgrammar/*.so
tar -C "$site" -c . | xz -9e -T0 >"$1"
ls -sh "$1"
