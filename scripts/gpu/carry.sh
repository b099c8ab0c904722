#!/usr/bin/env bash
# Fill DIR/k1 to DIR/k4 with the wheels of requirements-gpu-host.txt, each folder under
# 48 MiB, for scripts/gpu/run.py --wheels DIR (or DIR/k1, then DIR/k2, ...).
#
#   scripts/gpu/carry.sh DIR        about 800 MB are downloaded; keep DIR out of git
set -euo pipefail

(($# == 1)) || { sed -n 2,5p "$0" | cut -c3- >&2; exit 2; }
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$1"
out="$(cd "$1" && pwd)"
downloads="$out/.download"
platforms=(--platform any --platform linux_x86_64)
for libc in 39 35 34 31 28 27 26 24 17; do
  platforms+=(--platform "manylinux_2_${libc}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
mkdir -p "$downloads" "$out"/k{1,2,3,4}
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
  -d "$downloads" -r "$here/../requirements-gpu-host.txt"

# What a text server on a Hopper GPU never loads; FlashAttention 3 keeps its kernels for
# bf16 and heads of 64 or 128.
python3 "$here/slim_wheel.py" "$downloads"/sglang-*.whl "$out/k4" \
  '^sglang/(multimodal_gen|test|eval|benchmark|bench_\w+\.py)(/|$)|^sglang/srt/(grpc|server|multimodal|rust_extensions)/(_core|_grpc|_server|_multimodal)\S*\.so$'
python3 "$here/slim_wheel.py" "$downloads"/sglang_kernel-*.whl "$out/k2" \
  '/sm100/|infllm_ops|flashmla_ops|^triton_kernels/'
rm "$downloads"/sglang-*.whl "$downloads"/sglang_kernel-*.whl
mv "$downloads"/xgrammar-*.whl "$out/k1"
mv "$downloads"/flashinfer_python-*.whl "$downloads"/transformers-*.whl "$out/k3"
mv "$downloads"/*.whl "$out/k4"
rmdir "$downloads"
du -sm "$out"/k?
