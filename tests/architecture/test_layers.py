"""Imports point one way, and what offends the layout may only get less.

``offenders.json`` beside this file lists present offences: cycles of files, doors
around imports, class names defined twice, long files, coined words by file. The test
fails on one more and on one less. To write what there is now, and then look at the
difference:

    python tests/architecture/test_layers.py > tests/architecture/offenders.json
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vericache_sglang"
OFFENDERS = Path(__file__).with_name("offenders.json")
CODE_FOLDERS = ("vericache_sglang", "kernels", "patches", "scripts")
ROOMS = [
    *("registry", "errors", "former_names", "demo_records", "provenance", "config"),
    "compression",
    *(
        "device",
        "drafters",
        "sampling",
        "planning",
        "scheduling",
        "observability",
        "kv",
    ),
    *("prefix_cache", "simulation", "attention", "remote", "runtime", "platforms"),
    "serving",
    "plugin",
]
# The doors; and the room that looks at a server from outside.
ROOM_OF = {
    "__init__": "registry",
    "plan": "runtime",
    "simulate": "simulation",
    "compressors": "compression",
    "launch_server": "serving",
    "compress": "serving",
    "doctor": "serving",
    "evaluation": "plugin",
    "bench": "plugin",
    "divergence": "plugin",
    "workload": "plugin",
    "calibrate": "platforms",
}
LEAVES = {"evaluation", "calibrate"}
"""Nobody's foundation: only they import themselves."""
LEAF_DOORS = dict.fromkeys(("bench.py", "divergence.py", "workload.py"), "evaluation")
"""Commands that lead into one of them."""
NO_TORCH = {
    *("registry", "errors", "former_names", "demo_records", "provenance", "config"),
    *("planning", "scheduling", "simulation", "observability", "remote"),
}
NO_TORCH_FILES = {
    f"prefix_cache/{name}.py"
    for name in ("columns", "eviction", "index", "restore_costs", "savings", "segment")
}
SGLANG_ROOMS = {"sampling", "attention", "runtime", "platforms", "serving", "plugin"}
SGLANG_FILES = {
    *("kv/sglang_pools.py", "kv/query_tails.py", "kv/row_edit.py"),
    *("prefix_cache/store/backend.py", "prefix_cache/store/files.py"),
    *("prefix_cache/tiered_cache.py", "prefix_cache/assembly.py"),
    *("observability/sinks.py", "observability/consistency_check.py"),
}
HOOKING = {"plugin.py", "platforms/cpu/hooks.py"}
"""Files that may import the records of hooks."""


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return the module of a file and every node in it."""
    return tuple(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, in functions and for types too."""
    for node in nodes(file):
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
        return room not in NO_TORCH and path not in NO_TORCH_FILES
    if head == "vericache_patches":
        return path in HOOKING
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
        ("config/x.py", "import vericache_sglang.runtime.worker"),
        ("config/x.py", "from vericache_sglang import runtime"),
        ("kv/x.py", "def f():\n    from vericache_sglang.runtime import worker"),
        ("kv/x.py", "from .. import runtime"),
        ("kv/x.py", "import sglang"),
        ("scheduling/x.py", "import torch"),
        ("planning/x.py", "import torch"),
        ("scheduling/x.py", "from vericache_sglang.runtime import worker"),
        ("prefix_cache/index.py", "import torch"),
        ("prefix_cache/x.py", "from vericache_sglang.simulation import link"),
        ("compression/x.py", "from sglang.srt import environ"),
        ("runtime/x.py", "from vericache_sglang import launch_server"),
        ("serving/x.py", "import vericache_sglang.evaluation"),
        ("bench.py", "import vericache_sglang.calibrate"),
        ("runtime/x.py", "import vericache_sglang.calibrate"),
        ("calibrate/x.py", "from vericache_sglang.serving import launch"),
        ("runtime/x.py", "import vericache_patches.apply"),
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
        ("kv/sglang_pools.py", "from sglang.srt.mem_cache import memory_pool"),
        ("runtime/x.py", "import torch, sglang\nimport vericache_kernels.copy"),
        ("plugin.py", "import vericache_patches.apply"),
        ("platforms/cpu/hooks.py", "from vericache_patches.record import Patch"),
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


def test_every_module_says_what_it_is_for():
    files = [*python_files(), *(ROOT / "tests").rglob("test_*.py")]
    silent = [
        file.relative_to(ROOT).as_posix()
        for file in files
        if not ast.get_docstring(nodes(file)[0])
    ]
    assert silent == []


@pytest.mark.parametrize("folder", ["kernels", "patches", "tests", "scripts"])
def test_top_folders_are_not_importable_packages(folder):
    # `import kernels` belongs to Hugging Face's package, which transformers looks for.
    assert not (ROOT / folder / "__init__.py").exists()


def test_what_is_no_code_is_packaged_too():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packaged = {
        file
        for package, patterns in tools["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    others = {f for f in PACKAGE.rglob("*.*") if f.suffix not in {".py", ".pyc"}}
    assert {file for file in others if file.is_file()} == packaged
    assert packaged


# -- offences that may only get less --------------------------------------------------

PACKAGES = (
    "vericache_sglang",
    "kernels/vericache_kernels",
    "patches/vericache_patches",
)
MOST_LINES = 600
NO_DOORS = r"importlib\.(metadata|resources|machinery|util\.find_spec)"
"""Parts of importlib that import nothing."""
WORDS = {
    "complement": r"complements?",
    "park": r"park(?:s|ed|ing)?",
    "heard": r"hear(?:s|d)?",
    "loose": r"loose",
    "passenger": r"passengers?",
    "flight": r"(?<!in )flights?",
    "flying": r"flying",
    "conclusion": r"conclusions?",
    "residence": r"residences?",
    "mover": r"movers?",
    "reload": r"reload(?:s|ed|ing)?",
    "agreement": r"agreements?",
    "token board": r"token boards?",
    "shelf": r"shel(?:f|ves|ved)",
    "borrowed": r"borrow(?:s|ed)?",
    "arena": r"arenas?",
    "extent": r"extents?",
    "worth": r"worth",
    "shadow": r"shadows?",
    "steps aside": r"steps? aside",
    "stood still": r"stood still",
    "slips": r"slip(?:s|ped)?",
    "thrown": r"thrown",
    "gives up": r"g(?:ive|ives|iven|iving|ave) (?:up|back)",
    "splitter": r"splitters?",
    "unsplit": r"unsplit(?:s)?",
    "seat": r"seat(?:s|ed)?",
    "bare": r"bare",
    "dressed": r"dressed",
    "watch": r"watch(?:es|ed|ing)?",
    "body": r"(?:some|no|any|every)body",
    "in vain": r"in vain",
}
"""Coined words -> pattern over lower-case words; the field has others for them."""
EXEMPT = {"former_names.py", "demo_records.py"}
"""Files that may have them: aliases for one version; a demo model's training texts."""
ALIASES = "## Former names"
"""The heading of a page's copy of the aliases, at its end."""


def modules(root: Path) -> dict[str, Path]:
    """Return dotted name -> file of every module in our packages."""
    found = {}
    for package in PACKAGES:
        folder = root / package
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def shown(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


def cycles(root: Path) -> list[list[str]]:
    """Return the groups of files that import each other, for types or in functions."""
    files = modules(root)
    edges: dict[str, set[str]] = {}
    for name, file in files.items():
        targets = {
            target if target in files else target.rpartition(".")[0]
            for _, target in imports(file)
        }
        edges[name] = (targets & files.keys()) - {name}
    reach = {name: reachable(name, edges) for name in files}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in files
        if name in reach[name]
    }
    return sorted([shown(root, files[name]) for name in group] for group in groups)


def reachable(name: str, edges: dict[str, set[str]]) -> set[str]:
    """Return what can be reached over at least one edge."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        fresh = edges[ahead.pop()] - found
        found |= fresh
        ahead += fresh
    return found


def doors(root: Path) -> dict[str, list[str]]:
    """Return, by file, what imports around the import statement."""
    found = {}
    for file in modules(root).values():
        used = set()
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.add(f"{node.value.id}.{node.attr}")
            elif isinstance(node, ast.Name):
                used.add(node.id)
        used &= {"sys.path", "__import__", "runpy.run_path", "runpy.run_module"}
        names = {name for _, name in imports(file)}
        used |= {name for name in names if re.match(r"importlib|sys\.path", name)}
        used -= {name for name in names if re.match(NO_DOORS, name)}
        if used:
            found[shown(root, file)] = sorted(used)
    return found


def twins(root: Path) -> dict[str, list[str]]:
    """Return the class names that several files define."""
    places = defaultdict(list)
    for file in modules(root).values():
        for node in nodes(file)[0].body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(shown(root, file))
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def long_files(root: Path) -> dict[str, int]:
    """Return the files of more than ``MOST_LINES`` lines."""
    folders = (*CODE_FOLDERS, "tests")
    sizes = {
        shown(root, file): len(file.read_text().splitlines())
        for folder in folders
        for file in (root / folder).rglob("*.py")
    }
    return {name: size for name, size in sizes.items() if size > MOST_LINES}


def coined(text: str) -> dict[str, int]:
    """Count coined words, also inside identifiers in either spelling."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower()
    plain = " ".join(re.findall("[a-z]+", apart))
    counts = {
        word: len(re.findall(rf"\b{found}\b", plain)) for word, found in WORDS.items()
    }
    return {word: count for word, count in counts.items() if count}


def coined_words(root: Path) -> dict[str, dict[str, int]]:
    """Return the coined words by file: code, configuration, pages; tests follow."""
    files = [f for name in CODE_FOLDERS for f in (root / name).rglob("*.py")]
    files += (root / "vericache_sglang").rglob("*.yaml")
    files += (root / "vericache_sglang").rglob("*.html")
    files += (root / "configs").glob("*.yaml")
    files += (root / "configs" / "monitoring").glob("*")
    files += [*root.glob("*.md"), *(root / "docs").glob("*.md")]
    counts = {
        shown(root, file): coined(file.read_text().partition(ALIASES)[0])
        for file in files
        if file.name not in EXEMPT
    }
    return {name: found for name, found in counts.items() if found}


OFFENCES = {
    "cycles": cycles,
    "doors": doors,
    "classes defined twice": twins,
    "long files": long_files,
    "coined words": coined_words,
}


@pytest.mark.parametrize("kind", OFFENCES)
def test_there_are_the_known_offences_and_no_more(kind):
    present, known = OFFENCES[kind](ROOT), json.loads(OFFENDERS.read_text())[kind]
    if isinstance(known, list):
        assert present == known
        return
    more = {name: present[name] for name in present if present[name] != known.get(name)}
    gone = {name: known[name] for name in known if name not in present}
    assert more == {}, "new or changed; where it is less, write offenders.json again"
    assert gone == {}, "offends no longer: write offenders.json again"


@pytest.mark.parametrize(
    ("files", "kind", "found"),
    [
        (
            {
                "a.py": "from vericache_sglang.b import f",
                "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
                "    from vericache_sglang import a",
                "c.py": "def f():\n    import vericache_sglang.a",
            },
            "cycles",
            [["vericache_sglang/a.py", "vericache_sglang/b.py"]],
        ),
        (
            {
                "a.py": "import sys\nsys.path.insert(0, 'x')",
                "b.py": "from importlib import import_module",
                "c.py": "from importlib.metadata import version\nimport sys\nsys.argv\n"
                "from importlib.util import find_spec",
                "d.py": "import importlib.util as u",
                "e.py": "from sys import path\n__import__('x')",
            },
            "doors",
            {
                "vericache_sglang/a.py": ["sys.path"],
                "vericache_sglang/b.py": ["importlib.import_module"],
                "vericache_sglang/d.py": ["importlib.util"],
                "vericache_sglang/e.py": ["__import__", "sys.path"],
            },
        ),
        (
            {"a.py": "class A: ...\nclass B: ...", "b.py": "class A: ..."},
            "classes defined twice",
            {"A": ["vericache_sglang/a.py", "vericache_sglang/b.py"]},
        ),
        (
            {"a.py": "x = 1\n" * 600, "b.py": "x = 1\n" * 601},
            "long files",
            {"vericache_sglang/b.py": 601},
        ),
        (
            {
                "a.py": 'class HostComplement:\n    "Parked, borrowed."\n'
                "    token_boards = TokenBoard\n",
                "b.py": "in_flight = InFlightQueue  # in flight; a flight\n",
                "former_names.py": 'ALIASES = {"parks": "swap_outs"}\n',
                "c.py": "# shelter, barely, seating, disagreements, reseat\n",
            },
            "coined words",
            {
                "vericache_sglang/a.py": {
                    **{"complement": 1, "park": 1, "token board": 2, "borrowed": 1}
                },
                "vericache_sglang/b.py": {"flight": 1},
            },
        ),
    ],
    ids=[*OFFENCES],
)
def test_each_kind_of_offence_is_seen(tmp_path, files, kind, found):
    (tmp_path / "vericache_sglang").mkdir()
    for name, code in files.items():
        (tmp_path / "vericache_sglang" / name).write_text(code)
    assert OFFENCES[kind](tmp_path) == found


if __name__ == "__main__":
    everything = {kind: find(ROOT) for kind, find in OFFENCES.items()}
    print(json.dumps(everything, indent=1, sort_keys=True))
