"""Imports point one way; a new upward import fails here, not in a review."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vericache_sglang"
CODE_FOLDERS = ("vericache_sglang", "kernels", "patches", "scripts")
ROOMS = [
    *("registry", "errors", "config", "compression", "memory", "store", "planning"),
    *("scheduling", "tiers", "simulation", "telemetry", "engine", "serving"),
    "plugin",
]
# The doors; and the room that looks at a server from outside.
ROOM_OF = {
    "__init__": "registry",
    "plan": "planning",
    "simulate": "simulation",
    "compressors": "compression",
    "launch_server": "serving",
    "compress": "serving",
    "evaluation": "plugin",
    "bench": "plugin",
    "calibrate": "engine",
}
LEAVES = {"evaluation", "calibrate"}
"""Nobody's foundation: only they import themselves."""
LEAF_DOORS = {"bench.py": "evaluation"}
"""Commands that lead into one of them."""
NO_TORCH = {
    *("registry", "errors", "config", "planning", "scheduling", "tiers"),
    *("simulation", "telemetry"),
}
SGLANG_ROOMS = {"engine", "serving", "plugin"}
SGLANG_FILES = {
    *("memory/sglang_pools.py", "memory/paged_allocator.py", "store/backend.py"),
}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, in functions and for types too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def may_import(room: str, path: str, name: str) -> bool:
    """Say whether a file of ``room`` may import the dotted ``name``."""
    head, _, rest = name.partition(".")
    if not head:  # a relative import
        return False
    if head == "vericache_sglang":
        other = rest.partition(".")[0]
        if other in LEAVES:
            return path.startswith(other) or LEAF_DOORS.get(path) == other
        return other in ROOMS and ROOMS.index(other) <= ROOMS.index(room)
    if head == "sglang":
        return room in SGLANG_ROOMS or path in SGLANG_FILES
    if head == "torch":
        return room not in NO_TORCH
    if head == "vericache_patches":
        return path == "plugin.py"
    return True


def faults(package: Path) -> list[str]:
    """List what breaks the rules in ``package``, as ``file:line what``."""
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        top = path.removesuffix(".py").partition("/")[0]
        room = ROOM_OF.get(top, top)
        if room not in ROOMS:
            found.append(f"{path}:1 {room} is not in ROOMS")
            continue
        found += [
            f"{path}:{line} {room} -> {name}"
            for line, name in imports(file)
            if not may_import(room, path, name)
        ]
    return found


def kernel_faults(package: Path) -> list[str]:
    """List the imports of our rooms, and of SGLang, in ``vericache_kernels``."""
    banned = ("vericache_sglang", "vericache_patches", "sglang")
    return [
        f"{file.name}:{line} {name}"
        for file in sorted(package.rglob("*.py"))
        for line, name in imports(file)
        if name.startswith(".") or name.partition(".")[0] in banned
    ]


def test_rooms_import_downward_only():
    assert faults(PACKAGE) == []


def test_kernels_import_nothing_of_ours():
    assert kernel_faults(ROOT / "kernels" / "vericache_kernels") == []


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("config/x.py", "import vericache_sglang.engine.loop"),
        ("config/x.py", "from vericache_sglang import engine"),
        ("memory/x.py", "def f():\n    from vericache_sglang.engine import loop"),
        ("memory/x.py", "from .. import engine"),
        ("memory/x.py", "import sglang"),
        ("scheduling/x.py", "import torch"),
        ("planning/x.py", "import torch"),
        ("scheduling/x.py", "from vericache_sglang.engine import loop"),
        ("tiers/x.py", "import torch"),
        ("tiers/x.py", "from vericache_sglang.simulation import link"),
        ("compression/x.py", "from sglang.srt import environ"),
        ("engine/x.py", "from vericache_sglang import launch_server"),
        ("serving/x.py", "import vericache_sglang.evaluation"),
        ("bench.py", "import vericache_sglang.calibrate"),
        ("engine/x.py", "import vericache_sglang.calibrate"),
        ("calibrate/x.py", "from vericache_sglang.serving import launch"),
        ("engine/x.py", "import vericache_patches.apply"),
        ("launch_server.py", "from vericache_sglang import plugin"),
        ("helpers/x.py", ""),
    ],
)
def test_each_kind_of_fault_is_seen(tmp_path, path, code):
    file = tmp_path / "vericache_sglang" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert len(faults(tmp_path / "vericache_sglang")) == 1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("memory/sglang_pools.py", "from sglang.srt.mem_cache import memory_pool"),
        ("engine/x.py", "import torch, sglang\nimport vericache_kernels.copy"),
        ("plugin.py", "import vericache_patches.apply"),
        ("launch_server.py", "from vericache_sglang.serving.launch import main"),
        ("evaluation/x.py", "import vericache_sglang.config, torch"),
        ("evaluation/x.py", "from vericache_sglang.evaluation import y"),
        ("bench.py", "from vericache_sglang.evaluation.command import main"),
    ],
)
def test_what_is_allowed_passes(tmp_path, path, code):
    file = tmp_path / "vericache_sglang" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert faults(tmp_path / "vericache_sglang") == []


def python_files() -> list[Path]:
    """Return every Python file of the project that is not a test."""
    return sorted(f for folder in CODE_FOLDERS for f in (ROOT / folder).rglob("*.py"))


def test_files_stay_readable_in_one_sitting():
    sizes = {
        file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines())
        for file in [*python_files(), *(ROOT / "tests").rglob("*.py")]
    }
    assert {name: size for name, size in sizes.items() if size > 400} == {}


def test_every_module_says_what_it_is_for():
    files = [*python_files(), *(ROOT / "tests").rglob("test_*.py")]
    silent = [
        file.relative_to(ROOT).as_posix()
        for file in files
        if not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert silent == []


@pytest.mark.parametrize("folder", ["kernels", "patches", "tests", "scripts"])
def test_top_folders_are_not_importable_packages(folder):
    # `import kernels` belongs to Hugging Face's package, which transformers looks for.
    assert not (ROOT / folder / "__init__.py").exists()
