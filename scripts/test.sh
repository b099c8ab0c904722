#!/usr/bin/env bash
# Lint, types and tests: every subject once, in ten minutes on two slow cores, installs
# included; --all runs every test. Other arguments go to pytest (scripts/test.sh -k config).
# Goes on after a failure, says at the end what failed, and exits 1 if anything did.
set -uo pipefail

# pyproject.toml leaves out what is marked as extended; an empty expression does not.
every=()
if [[ "${1:-}" == --all ]]; then
  every=(-m "")
  shift
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
"$root/scripts/setup_env.sh" || exit 1
unset PYTHONDONTWRITEBYTECODE # set by images; every process would compile what it imports
bin="$root/.venv/bin"
report="$root/.venv/pytest-report.xml"
failed=()

# With --all the live page is tested in a browser too; without one that test says it is
# skipped. (Ubuntu's package of that name is a stub for another installer.)
if (( ${#every[@]} )) && [[ -z "${CHROMIUM:-}" && $EUID -eq 0 ]] && ! command -v chromium >/dev/null &&
  grep -qs '^ID=debian' /etc/os-release; then
  printf '\n== installing chromium\n'
  timeout 180 bash -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends chromium' >/dev/null 2>&1 ||
    printf 'no chromium; its test will be skipped\n'
fi

# Each check is a process group of its own, which gets the signals that this script gets.
set -m
run() {
  local status=0
  "$@" &
  trap "interrupted=1; kill -INT -- -$!" INT TERM HUP
  wait $! || status=$?
  if [[ -n "${interrupted:-}" ]]; then
    wait $!
    printf '\ninterrupted\n'
    exit 130
  fi
  return "$status"
}

check() {
  local label="$1" started=$SECONDS
  shift
  printf '\n== %s\n' "$label"
  if run "$@"; then
    printf '== %s: ok (%d s)\n' "$label" $((SECONDS - started))
  else
    printf '== %s: FAILED (%d s)\n' "$label" $((SECONDS - started))
    failed+=("$label")
  fi
}

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
rm -f "$report"
# Three processes on two cores: a test waits for its server a third of the time. What shares
# servers stays in one process (tests/conftest.py). A hanging test ends by its own timeout (pyproject.toml).
check "pytest" "$bin/python" -m pytest -n 3 --no-loadscope-reorder \
  --durations=25 --junitxml="$report" "${every[@]}" "$@"

printf '\n== summary\n'
"$bin/python" - "$report" <<'PY'
import collections
import sys
import xml.etree.ElementTree as ElementTree

try:
    cases = list(ElementTree.parse(sys.argv[1]).iter("testcase"))
except OSError:
    sys.exit("pytest wrote no report")
skips = [case.find("skipped") for case in cases if case.find("skipped") is not None]
reasons = collections.Counter(skip.get("message", "") for skip in skips)
print(f"{len(cases)} tests, {len(skips)} skipped")
for reason, count in reasons.most_common():
    print(f"  {count} skipped: {reason}")
PY
if (( ${#failed[@]} )); then
  printf 'FAILED: %s\n' "${failed[*]}"
  exit 1
fi
printf 'all checks passed\n'
