"""The interface of a check, and the context that every check receives.

Nothing here needs torch or SGLang: it is imported before any wheel is installed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu.job import Job

ROOT = Path(__file__).parents[2]
"""The repository."""


OWN_BACKEND = "vericache"
"""Our attention backend: the only one that reads codes, and it needs no FA3."""


class NotMetError(Exception):
    """Everything ran, and what came of it is wrong: no log says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The command line, as far as checks depend on it.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal.
        out: Folder of the results.
        site: Folder of carried packages, outside the repository.
        engine: Flags of ``launch_server`` that every server gets.
        stack: See ``gpu.stack.probe``.
        argv: The command line, without the interpreter.
        source: Digest of the code that is measured.
    """

    device: str
    out: str
    site: str
    engine: list[str]
    stack: dict[str, Any]
    argv: list[str]
    source: str

    @property
    def on_cpu(self) -> bool:
        """Whether this is a rehearsal."""
        return self.device == "cpu"

    @property
    def has_fa3(self) -> bool:
        """Whether SGLang's default attention on a Hopper GPU runs."""
        return not self.stack["fa3_error"]

    def to_json(self) -> str:
        """Return what ``Context(**json.loads(text))`` takes."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question with one results file, answered in a process of its own.

    Attributes:
        name: Of letters, digits and "-"; unique in its part.
        about: What is asked, in words.
        run: Answers it, filling in ``Job.figures``; raises where it fails.
        seconds: After them it is ended and has failed; most take less than half.
    """

    name: str
    about: str
    run: Callable[[Job], None]
    seconds: float


def shared_flags(context: Context) -> list[str]:
    """Return SGLang's flags of every server: its defaults, as far as they can run."""
    flags = ["--skip-server-warmup", "--random-seed", "0"]
    if context.on_cpu:
        flags += ["--max-total-tokens", "16384", "--max-running-requests", "8"]
    elif context.stack["carried"]:
        # Both would compile for minutes at first use.
        flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
    return [*flags, *context.engine]


def backend_flags(context: Context, *, drafts: bool, own: bool = False) -> list[str]:
    """Return the attention backend of a server; none where the default one can run.

    Args:
        context: See there.
        drafts: For VeriCache and not for plain SGLang.
        own: Our backend, whatever the default is.
    """
    if context.on_cpu or (context.has_fa3 and not own):
        return []
    return ["--attention-backend", OWN_BACKEND if own or drafts else "triton"]


def first_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first position where two answers differ; None where they are equal."""
    if list(wanted) == list(got):
        return None
    pairs = enumerate(zip(wanted, got, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(got)))


def environment(site: str) -> dict[str, str]:
    """Return the variables of every process: where it imports from, and no network."""
    paths = [site, ROOT, *(ROOT / name for name in ("kernels", "patches", "scripts"))]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        # Or every process compiles what it imports, some 15 s.
        "PYTHONDONTWRITEBYTECODE": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # What SGLang and Triton compile at first use; it outlasts the command.
        "SGLANG_JIT_CACHE_DIR": f"{site}-compiled",
        "TRITON_CACHE_DIR": f"{site}-compiled/triton",
        # A host's torch decides which build of SGLang's kernels loads.
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        # SGLang's prefix tree in Rust reads tensors as torch 2.13 lays them out.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }
