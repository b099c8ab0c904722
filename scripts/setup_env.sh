#!/usr/bin/env bash
# Make .venv in the repository root, or leave it alone where it is current.
#
#   VERICACHE_DEVICE=cpu|cuda   which set of packages; default cpu, on a machine with a
#                               GPU too: VeriCache serves on CPUs only so far
#   PYTHON=python3.11           interpreter to build with; 3.11 or newer, with venv
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/vericache-stamp"
log="$venv/setup.log"

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

device="${VERICACHE_DEVICE:-cpu}"
[[ "$device" == cpu || "$device" == cuda ]] ||
  fail "VERICACHE_DEVICE must be cpu or cuda, got '$device'"

requirements="$root/scripts/requirements-$device.lock"
test_requirements="$root/scripts/requirements-test.lock"
# Not in the lock: its hash is PyTorch's own index's to tell.
cpu_torch="$(grep '^torch==' "$root/scripts/requirements-cpu.txt")"

# The root is part of it: an editable install points into the checkout it was made in.
fingerprint="$(
  { echo "$device $root $cpu_torch"; cat "$requirements" "$test_requirements" \
      "$root/pyproject.toml" "${BASH_SOURCE[0]}"; } | sha256sum | cut -d' ' -f1
)"
if [[ -f "$stamp" && "$(<"$stamp")" == "$fingerprint" && -x "$venv/bin/python" ]]; then
  say "$venv is current ($device)"
  exit 0
fi

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
    [[ -n "$candidate" ]] || continue
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then
      printf '%s' "$candidate"
      return
    fi
  done
  return 1
}

# Runs a command with its output in the log; a line every 15 s says it is alive.
step() {
  local label="$1" started=$SECONDS status=0
  shift
  say "$label ..."
  "$@" >>"$log" 2>&1 &
  local pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    if (( (SECONDS - started) % 15 == 14 )); then
      say "  $((SECONDS - started)) s, still at it"
    fi
  done
  wait "$pid" || status=$?
  if (( status != 0 )); then
    tail -n 25 "$log" >&2
    fail "$label failed (status $status); the whole log is $log"
  fi
  say "  done in $((SECONDS - started)) s"
}

if ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' \
    >/dev/null 2>&1; then
  python="$(find_python)" ||
    fail "no Python 3.11 or newer with venv found; install one or set PYTHON"
  say "making $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv" || fail "$python -m venv failed; install python3-venv"
fi
rm -f "$stamp"
: >"$log"

# Most modules are never imported: pip would compile all of them, the last step compiles
# what a server imports. Images set a variable under which every process would do so.
unset PYTHONDONTWRITEBYTECODE
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
# PyPI's torch is the CUDA build; a local index or wheel folder may hold the CPU one.
install_cpu_torch() {
  "${pip[@]}" install --no-compile --no-deps "$cpu_torch" ||
    "${pip[@]}" install --no-compile --no-deps "$cpu_torch" \
      --index-url https://download.pytorch.org/whl/cpu
}

if [[ "$device" == cpu ]]; then
  step "installing torch for CPU" install_cpu_torch
fi
# The locks are complete, so there is nothing to resolve. uv installs in seconds what takes
# pip a minute; of pip's settings it gets the index, and pip itself has the last try.
install_locked() {
  local locked=(--no-deps --require-hashes -r "$requirements" -r "$test_requirements") index
  index="${PIP_INDEX_URL:-$("${pip[@]}" config get global.index-url 2>/dev/null || true)}"
  "${pip[@]}" install --no-compile --no-deps --require-hashes \
    -r <(sed -n '/^uv==/,/[^\\]$/p' "$test_requirements") &&
    env ${index:+"UV_DEFAULT_INDEX=$index"} \
      "$venv/bin/uv" pip install --python "$venv/bin/python" "${locked[@]}" ||
    "${pip[@]}" install --no-compile "${locked[@]}"
}
step "installing the other packages (CUDA's: several minutes)" install_locked
step "installing this project" \
  "${pip[@]}" install --no-compile --no-deps --no-build-isolation -e "$root"
step "compiling what a server imports" "$venv/bin/python" -c "
from pkgutil import resolve_name
from vericache_sglang.evaluation.fork_server import PREPARED
for name in (*PREPARED, 'vericache_sglang.launch_server', 'vericache_sglang.runtime.worker'):
    resolve_name(name)
"

echo "$fingerprint" >"$stamp"
say "ready: $venv ($device)"
