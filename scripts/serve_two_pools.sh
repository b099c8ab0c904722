#!/usr/bin/env bash
# One command: a store, a verifier, two drafters and SGLang's router on this machine, and
# questions through them. Options: see scripts/serve_two_pools.py --help.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup_env.sh"
unset PYTHONDONTWRITEBYTECODE # set by images; every process would compile what it imports

# The router has an environment of its own: it is no part of a server.
router="$root/.venv/router"
if [[ ! -x "$router/bin/sglang-router" ]]; then
  printf '[setup] installing sglang-router ...\n'
  "$root/.venv/bin/uv" venv -q --clear "$router"
  "$root/.venv/bin/uv" pip install -q --python "$router" sglang-router==0.3.2
fi
exec "$root/.venv/bin/python" "$root/scripts/serve_two_pools.py" \
  --router "$router/bin/sglang-router" "$@"
