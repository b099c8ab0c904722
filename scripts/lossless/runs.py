"""Running a job in a child process, and comparing two runs request by request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(
    [
        str(ROOT / "scripts"),
        str(ROOT / "tests" / "compressors"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)
"""Import path of the child: this package, the tests' own compressors, and ours."""

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""SGLang's own accounting, asserted after every scheduler iteration.

Compiling the seeded sampler for a CPU would take 20 s at its first use.

One OpenMP thread: on a shared 2-core machine a second one spins at every barrier (the
same requests took 2.2 s with one and 31 s with two).
"""

ENGINE = {
    "device": "cpu",
    "attention_backend": "vericache",
    "dtype": "float32",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 196608,
    "max_running_requests": 16,
    "log_level": "warning",
}
"""Arguments of every engine; a system may override each."""


FAULTS = ROOT / "tests" / "faults" / "plugin"


def faulty(fault: str, paths: str = PATHS) -> dict[str, str]:
    """Return the environment that installs one of the tests' faults in a child.

    Args:
        fault: Module of ``vericache_test_faults``.
        paths: What else it imports from.
    """
    return {"VERICACHE_TEST_FAULT": fault, "PYTHONPATH": f"{paths}{os.pathsep}{FAULTS}"}


class RunError(RuntimeError):
    """The child process failed; the message ends with what it printed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to serve.

    Attributes:
        name: As it appears in results.
        settings: VeriCache's settings; None serves with plain SGLang.
        engine: Arguments of ``sglang.Engine`` beyond ``ENGINE``.
        environment: Environment variables beyond ``STRICT``.
    """

    name: str
    settings: dict[str, Any] | None
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference between two answers to one request.

    Attributes:
        wave: Index of the wave.
        request: Index of the request in its wave.
        position: First differing token, in output tokens; -1 for a finish reason.
        wanted: What plain SGLang emitted from there on, up to eight tokens.
        got: What VeriCache emitted there.
    """

    wave: int
    request: int
    position: int
    wanted: str
    got: str


def run(
    system: System, model: Path, waves: list[dict[str, Any]], timeout: float = 1800
) -> dict[str, Any]:
    """Answer ``waves`` with a fresh engine in a child process.

    Args:
        system: How to serve.
        model: Folder of the model.
        waves: Requests; see ``lossless.answer``.
        timeout: Most seconds the child may take.

    Returns:
        ``waves`` (answers), ``seconds`` per wave and ``state`` (VeriCache's counters).

    Raises:
        RunError: The child failed or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder, "job.json"), Path(folder, "out.json")
        log = Path(folder, "log.txt")
        write_job(job, system, model, waves)
        command = [sys.executable, "-m", "lossless.answer", str(job), str(out)]
        with log.open("w", encoding="utf-8") as stream:
            try:
                subprocess.run(
                    command,
                    env={**os.environ, "PYTHONPATH": PATHS, **system.environment},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise RunError(f"{system.name}: {_tail(log)}") from error
        return read_report(system, out, log)


def write_job(
    file: Path, system: System, model: Path, waves: list[dict[str, Any]]
) -> None:
    """Write what ``lossless.answer`` reads."""
    description = {
        "engine": {**ENGINE, "model_path": str(model), **system.engine},
        "settings": system.settings,
        "environment": {**STRICT, **system.environment},
        "waves": waves,
    }
    file.write_text(json.dumps(description), encoding="utf-8")


def read_report(system: System, out: Path, log: Path) -> dict[str, Any]:
    """Return what ``lossless.answer`` wrote.

    Raises:
        RunError: It wrote nothing; says how its log ends.
    """
    if not out.exists():
        raise RunError(f"{system.name}: {_tail(log)}")
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


def compare(wanted: dict[str, Any], got: dict[str, Any]) -> list[Mismatch]:
    """List every request whose tokens or finish reason differ."""
    found = []
    for w, (plain, ours) in enumerate(zip(wanted["waves"], got["waves"], strict=True)):
        for r, (a, b) in enumerate(zip(plain, ours, strict=True)):
            at = _first_difference(a["ids"], b["ids"])
            if at is not None:
                found.append(
                    Mismatch(
                        w, r, at, str(a["ids"][at : at + 8]), str(b["ids"][at : at + 8])
                    )
                )
            elif a["finish_reason"] != b["finish_reason"]:
                found.append(
                    Mismatch(w, r, -1, str(a["finish_reason"]), str(b["finish_reason"]))
                )
    return found


def tokens(report: dict[str, Any]) -> int:
    """Count the output tokens of a run."""
    return sum(len(answer["ids"]) for wave in report["waves"] for answer in wave)


def _first_difference(a: list[int], b: list[int]) -> int | None:
    if a == b:
        return None
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-6000:]
