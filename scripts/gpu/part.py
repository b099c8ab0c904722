"""The records of a part: what it is given, its steps, and what came of them.

Nothing here needs torch or SGLang: the runner reads it before any wheel is installed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[2]
"""The repository."""

REHEARSAL = (
    "REHEARSAL on a CPU at toy sizes: shows that the command runs, says nothing about "
    "a GPU"
)
"""First words of everything a run with ``--device cpu`` writes."""

Results = dict[str, dict[str, Any]]
"""What each step of a part returned, by its name; ``error`` where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every part is told.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal.
        out: Folder of the results.
        site: Folder of carried packages, outside the repository.
        wheels: Folder of carried wheels, or of folders of them; None: none.
        minutes: Most that a part may take.
        backend: ``--attention-backend`` of servers that draft, and of the plain ones
            whose tokens theirs must equal; "" leaves the choice to SGLang.
        plain_backend: The same for plain SGLang where speed is compared.
    """

    device: str
    out: Path
    site: Path
    wheels: Path | None = None
    minutes: float = 8.0
    backend: str = ""
    plain_backend: str = ""

    @property
    def rehearsal(self) -> bool:
        """Whether figures mean nothing."""
        return self.device == "cpu"

    @property
    def label(self) -> str:
        """First words of what is written; "" on a GPU."""
        return REHEARSAL if self.rehearsal else ""

    def to_json(self) -> str:
        """Return the text ``from_json`` reads."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Context:
        """Return the context that ``to_json`` wrote."""
        fields: dict[str, Any] = json.loads(text)
        for name in ("out", "site", "wheels"):
            fields[name] = fields[name] and Path(fields[name])
        return cls(**fields)

    def environment(self) -> dict[str, str]:
        """Return the variables of a part's process: where it imports from."""
        folders = [self.site, ROOT, ROOT / "kernels", ROOT / "patches"]
        paths = [*map(str, folders), str(ROOT / "scripts")]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Modules that SGLang compiles at first use; carried ones lie there too.
            "TVM_FFI_CACHE_DIR": str(self.site.with_name(f"{self.site.name}-compiled")),
            # A host's torch decides which build of SGLang's kernels loads.
            "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        }


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of a part's work; the part resumes behind the last one that ended.

    Attributes:
        name: Unique in the part.
        run: Does it; returns plain values, raises where it fails.
        seconds: Expected; not begun where less is left.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement on a part's figures.

    Attributes:
        what: In words.
        wanted: In words.
        got: In words.
        passed: Whether it is met.
    """

    what: str
    wanted: str
    got: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a part came to.

    Attributes:
        headline: A few words for the table of parts.
        checks: Requirements; one that is not met makes the part fail.
        tables: For the Markdown page.
        label: First words of all of it, beside the rehearsal's; "" for none.
    """

    headline: str
    checks: tuple[Check, ...] = ()
    tables: tuple[Table, ...] = ()
    label: str = ""


class PartModule(Protocol):
    """What a module of ``gpu.parts`` has; importing it needs no torch, no SGLang."""

    def steps(self, context: Context) -> list[Step]:
        """Return the steps, in order."""

    def conclude(self, context: Context, results: Mapping[str, Any]) -> Summary:
        """Sum up; ``results`` may lack steps, and steps may have failed."""


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the table of parts.

    Attributes:
        name: As ``--parts`` has it; that of the module too.
        about: What it does.
        minutes: Expected on a GPU, all steps.
        needs: Packages that must be importable.
        rehearses: Whether it makes sense on a CPU.
    """

    name: str
    about: str
    minutes: float
    needs: tuple[str, ...] = field(default=())
    rehearses: bool = True
