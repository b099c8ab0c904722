"""Compare every setting of the matrix with plain SGLang, token by token.

    python scripts/check_lossless.py            # the whole matrix, about 40 minutes
    python scripts/check_lossless.py --covering # what the test suite runs
    python scripts/check_lossless.py --compressors --out FILE

The last runs every compressor with its KV on the device, on the host and over a slow
link. Writes ``--out`` after every row, so a stopped run keeps what it has; ``--resume``
goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))

from lossless.matrix import COVERING, PLAIN, full, methods
from lossless.prompts import load_tokenizer
from lossless.provenance import provenance
from lossless.requests import waves
from lossless.runs import RunError, compare, tokens
from lossless.warm import run

ROOT = Path(__file__).parents[1]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=8000, help="prompt tokens")
    parser.add_argument("--seed", type=int, default=7)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--covering", action="store_true")
    which.add_argument("--compressors", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "scripts/results/lossless.json"
    )
    return parser.parse_args()


def check(system: Any, options: argparse.Namespace, requests: Any, plain: Any) -> Any:
    """Run one row; a run that fails is a row with an error, not the end."""
    row: dict[str, Any] = {
        "name": system.name,
        "settings": without_root(system.settings),
        "engine": system.engine,
    }
    try:
        ours = run(system, options.model, requests)
    except RunError as error:
        return {**row, "error": str(error)[-2000:]}
    mismatches = compare(plain, ours)
    state = ours["state"]
    return {
        **row,
        "tokens_compared": tokens(ours),
        "mismatches": len(mismatches),
        "examples": [asdict(mismatch) for mismatch in mismatches[:5]],
        "rounds": state["rounds"],
        "splits": state["splits"],
        "mean_accepted": state["mean_accepted"],
        "mixed_share": state["mixed_share"],
        "seconds": sum(ours["seconds"]),
    }


def without_root(settings: Any) -> Any:
    """Return settings whose files are named from the repository on."""
    return json.loads(json.dumps(settings).replace(f"{ROOT}/", ""))


def main() -> int:
    """Run the matrix; status 1 when a token differed or a run failed."""
    options = arguments()
    requests = waves(
        load_tokenizer(options.model), options.prompts, options.longest, options.seed
    )
    rows: list[dict[str, Any]] = []
    if options.resume and options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in rows if "error" not in row]
    done = {row["name"] for row in rows}
    if options.compressors:
        systems = methods()
    else:
        systems = list(COVERING) if options.covering else full()
    print("plain SGLang, the baseline", file=sys.stderr)
    plain = run(PLAIN, options.model, requests)
    report = {**provenance(sys.argv[1:]), "prompts": options.prompts}
    options.out.parent.mkdir(exist_ok=True)
    for system in tqdm([s for s in systems if s.name not in done], unit="setting"):
        rows.append(check(system, options, requests, plain))
        compared = sum(row.get("tokens_compared", 0) for row in rows)
        differing = sum(row.get("mismatches", 0) for row in rows)
        failed = sum("error" in row for row in rows)
        report |= {
            "tokens_compared": compared,
            "mismatches": differing,
            "failed_runs": failed,
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if "error" in rows[-1] or rows[-1]["mismatches"]:
            tqdm.write(json.dumps(rows[-1], indent=1))
    print(
        f"{len(rows)} settings, {report['tokens_compared']} tokens compared, "
        f"{report['mismatches']} requests differ, {report['failed_runs']} runs failed"
    )
    return 1 if report["mismatches"] or report["failed_runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
