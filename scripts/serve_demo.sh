#!/usr/bin/env bash
# One command: install what is missing, serve the demo model, ask it, compare.
# Options: see scripts/serve_demo.py --help.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup_env.sh"
unset PYTHONDONTWRITEBYTECODE # set by images; every process would compile what it imports
exec "$root/.venv/bin/python" "$root/scripts/serve_demo.py" "$@"
