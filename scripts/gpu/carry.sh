#!/usr/bin/env bash
# Fill DIR/k1, DIR/k2, DIR/k3 with the wheels that a host without network lacks, each
# folder under 48 MiB, for scripts/gpu/run.py --wheels DIR (or DIR/k1, then DIR/k2, ...).
#
#   scripts/gpu/carry.sh DIR        about 450 MB are downloaded; keep DIR out of git
#
# For a host with Python 3.12, torch 2.11 (CUDA 13.0), triton 3.6 and the packages that
# come with them; another host needs another KERNELS: the wheel must fit its torch.
set -euo pipefail

(($# == 1)) || { sed -n 2,8p "$0" | cut -c3- >&2; exit 2; }
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$1"
out="$(cd "$1" && pwd)"
downloads="$out/.download"
SGLANG=sglang==0.5.21
# 0.4.5 has all its ops on CUDA under torch 2.11; 0.4.7, which SGLang 0.5.21 names, wants
# torch 2.13 and registers its kernels under another device there.
KERNELS=sglang-kernel==0.4.5
LARGE=(xgrammar==0.2.1 flashinfer_python==0.6.15.post1 transformers==5.12.1)
REST=(
  tokenizers==0.22.2 llguidance==1.9.1 openai_harmony==0.0.4 apache_tvm_ffi==0.1.11
  pycryptodomex==3.24.2 pydantic==2.14.3 pydantic_core==2.50.4 soundfile==0.13.1
  openai==2.6.1 pyzmq==27.3.0 rpds_py==2026.9.1 outlines_core==0.1.26 jiter==0.19.0
  msgspec==0.22.0 compressed_tensors==0.18.0 cffi==2.1.1 pycparser==3.12
  fastapi==0.165.0 starlette==1.10.0 uvicorn==0.54.0 opentelemetry_api==1.45.2
  orjson==3.13.0 dill==0.4.1 gguf==0.19.0 pybase64==1.5.1 outlines==0.1.11
  interegular==0.3.3 diskcache==5.6.3 jsonschema==4.26.0
  jsonschema_specifications==2025.9.1 referencing==0.37.0 pydantic_extra_types==2.11.1
  blobfile==3.0.0 loguru==0.7.3 setproctitle==1.3.8 python_multipart==0.0.34
  distro==1.9.0 sniffio==1.3.1 partial_json_parser==0.2.1.1.post7
  typing_inspection==0.4.5 annotated_types==0.8.0 easydict==1.14 xxhash==4.1.0
)
# What the kernels' tests run with.
TESTS=(
  pytest==9.2.0 pluggy==1.7.0 iniconfig==2.3.1 pygments==2.21.0 hypothesis==6.170.15
  sortedcontainers==2.4.0
)

platforms=(--platform any --platform linux_x86_64)
for libc in 39 35 34 31 28 27 26 24 17; do
  platforms+=(--platform "manylinux_2_${libc}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
mkdir -p "$downloads" "$out/k1" "$out/k2" "$out/k3/IPython"
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
  -d "$downloads" "$SGLANG" "$KERNELS" "${LARGE[@]}" "${REST[@]}" "${TESTS[@]}"

# What a text server on a Hopper GPU never loads.
python3 "$here/slim_wheel.py" "$downloads"/sglang-*.whl "$out/k3" \
  '^sglang/(multimodal_gen|test|eval|benchmark|bench_\w+\.py)(/|$)|^sglang/srt/(grpc|server|multimodal|rust_extensions)/(_core|_grpc|_server|_multimodal)\S*\.so$'
python3 "$here/slim_wheel.py" "$downloads"/sglang_kernel-*.whl "$out/k2" \
  'flash_ops\.abi3\.so|/sm100/|infllm_ops|^triton_kernels/'
for wheel in "$downloads"/*.whl; do
  case "$(basename "$wheel")" in
    sglang-* | sglang_kernel-*) ;;
    xgrammar-*) cp "$wheel" "$out/k1/" ;;
    flashinfer_python-* | transformers-*) cp "$wheel" "$out/k2/" ;;
    *) cp "$wheel" "$out/k3/" ;;
  esac
done
# SGLang imports two names of IPython; the real one brings twelve packages more.
printf 'def get_ipython():\n    return None\n' >"$out/k3/IPython/__init__.py"
cat >"$out/k3/IPython/display.py" <<'PY'
def display(*args, **kwargs):
    return None


class HTML(str):
    pass


def clear_output(*args, **kwargs):
    return None
PY
# What is measured there has no .git to say it.
git -C "$here" describe --always --dirty >"$out/COMMIT"
rm -rf "$downloads"
du -sm "$out/k1" "$out/k2" "$out/k3"
