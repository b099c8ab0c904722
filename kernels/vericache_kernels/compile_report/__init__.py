"""Compiles the Triton kernels without a GPU and reports their resource usage."""

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
    """One kernel with its compile-time parameters.

    Attributes:
        name: Unique description.
        kernel: The ``triton.jit`` function.
        signature: Argument name -> Triton type of the run-time arguments. Pointers and
            strides are assumed to be multiples of 16, as torch's are.
        constants: Argument name -> value of the compile-time arguments.
        warps: Warps per program.
        registers: Maximum registers per thread.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    registers: int = 255


@dataclass(frozen=True)
class Figures:
    """Resource usage of one build on one architecture.

    Attributes:
        registers: Registers per thread; the hardware maximum is 255.
        spill_bytes: Bytes per thread of register spill stores and loads, counted
            statically.
        stack_bytes: Stack bytes per thread.
        shared_bytes: Shared memory per program.
        cubin_bytes: Size of the binary.
        programs: Programs that fit on a multiprocessor, by registers, shared memory and
            warps.
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
        architecture: Compute capability times ten.

    Raises:
        RuntimeError: The assembler rejects Triton's PTX.
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
    """Assemble again with verbose output, using Triton's ``ptxas``.

    Raises:
        RuntimeError: See ``compile_build``.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    # Architecture-specific instructions need an "a" target, as Triton chooses.
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
        RuntimeError: The assembler's output has an unknown format.
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
"""Shared memory that CUDA reserves per program."""


def _programs(architecture: int, registers: int, shared: int, warps: int) -> int:
    """Return the programs that fit on a multiprocessor."""
    a_thread = -(-registers // 8) * 8
    return min(
        REGISTERS // (a_thread * 32 * warps),
        SHARED_BYTES[architecture] // (shared + RESERVED_SHARED_BYTES),
        WARPS // warps,
        MOST_PROGRAMS,
    )
