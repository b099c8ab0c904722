"""Compile the Triton kernels without a GPU and read what the assembler says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities that are reported: A100, H100 and H200, B200."""


@dataclass(frozen=True)
class Build:
    """One kernel with everything that is fixed when it is compiled.

    Attributes:
        name: Unique; what is compiled, in words.
        kernel: The function that ``triton.jit`` made.
        signature: Triton type of every argument that is not fixed, by name. Pointers
            and strides are taken to be multiples of 16, as torch's are.
        constants: Value of every argument that is.
        warps: Warps of a program.
        registers: Most a thread may use.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    registers: int = 255


@dataclass(frozen=True)
class Figures:
    """What one build takes on one architecture.

    Attributes:
        registers: Of a thread; 255 is the most there is.
        spill_bytes: Stored to and loaded from local memory for want of registers, of a
            thread, counted once each in the code.
        stack_bytes: Of a thread.
        shared_bytes: Of a program.
        cubin_bytes: Size of the binary.
        programs: That fit on a multiprocessor, by registers, shared memory and warps.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    cubin_bytes: int
    programs: int


def compile_build(build: Build, architecture: int) -> Figures:
    """Compile for an architecture; needs Triton, no GPU and no driver.

    Args:
        build: What to compile.
        architecture: Compute capability times ten.

    Raises:
        RuntimeError: The assembler refuses what Triton made.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    kinds = {name: build.signature.get(name, "constexpr") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if kinds[name].startswith("*") or name.endswith("_stride")
    }
    source = ASTSource(
        fn=build.kernel, signature=kinds, constexprs=build.constants, attrs=aligned
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": build.warps, "maxnreg": build.registers},
    )
    counts = _assembler_counts(compiled.asm["ptx"], architecture)
    shared = int(compiled.metadata.shared)
    return Figures(
        registers=counts["registers"],
        spill_bytes=counts["spill stores"] + counts["spill loads"],
        stack_bytes=counts["stack frame"],
        shared_bytes=shared,
        cubin_bytes=len(compiled.asm["cubin"]),
        programs=_programs(architecture, counts["registers"], shared, build.warps),
    )


def _assembler_counts(ptx: str, architecture: int) -> dict[str, int]:
    """Assemble once more, verbosely; ``ptxas`` is the one that Triton brings.

    Raises:
        RuntimeError: See ``compile_build``.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    # Instructions of one generation only have an "a" target, as Triton chooses too.
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    name = target.group(1) if target else f"sm_{architecture}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [
                *(get_ptxas(architecture).path, "-v", f"--gpu-name={name}"),
                *(file.name, "-o", "/dev/null"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"ptxas for {name}: {done.stderr.strip()}")
    found = {"registers": _number(r"Used (\d+) registers", done.stderr)}
    for kind in ("stack frame", "spill stores", "spill loads"):
        found[kind] = _number(rf"(\d+) bytes {kind}", done.stderr)
    return found


def _number(pattern: str, text: str) -> int:
    """Return the number in ``text``.

    Raises:
        RuntimeError: The assembler says something else than it used to.
    """
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"ptxas -v does not say {pattern!r}: {text.strip()}")
    return int(match.group(1))


# CUDA C++ programming guide, "Technical Specifications per Compute Capability".
REGISTERS = 65536
WARPS = 64
MOST_PROGRAMS = 32
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
RESERVED_SHARED_BYTES = 1024
"""That the system takes of every program."""


def _programs(architecture: int, registers: int, shared: int, warps: int) -> int:
    """Return the programs that fit on a multiprocessor."""
    a_thread = -(-registers // 8) * 8
    return min(
        REGISTERS // (a_thread * 32 * warps),
        SHARED_BYTES[architecture] // (shared + RESERVED_SHARED_BYTES),
        WARPS // warps,
        MOST_PROGRAMS,
    )
