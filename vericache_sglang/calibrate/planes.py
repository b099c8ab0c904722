"""Measure codecs on one model's KV and choose the bit planes of ``split-planes``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vericache_sglang.calibrate.acceptance import Cycles, replay
from vericache_sglang.calibrate.cache import KV
from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.compression.codecs.floats import FORMATS
from vericache_sglang.errors import InvariantError
from vericache_sglang.planning.bound import roofline
from vericache_sglang.planning.hardware import Machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vericache_sglang.calibrate.acceptance import Reading
    from vericache_sglang.calibrate.subject import Subject
    from vericache_sglang.compression.codecs.base import Codec, PartSpec

LEAST_BITS = 1
"""Bits of a code beside exponent and mantissa: the sign."""


@dataclass(frozen=True, slots=True)
class Point:
    """Measurements of one codec.

    Attributes:
        line: Codec name and parameters, as ``create_codec`` takes them.
        keep: c, bytes of the draft KV over those of the full KV, overhead included.
        transfer: Bytes of the residual KV over those of the full KV, escapes included.
        key_error: Relative error of the draft keys, Frobenius norm over all layers.
        value_error: The same of the values.
        cycles: Acceptance counts by draft length.
    """

    line: str
    keep: float
    transfer: float
    key_error: float
    value_error: float
    cycles: Mapping[int, Cycles]


@dataclass(frozen=True, slots=True)
class PlaneChoice:
    """The chosen codec and draft length.

    Attributes:
        line: Codec name and parameters.
        draft_length: Tokens per draft-verify cycle.
        accepted: Mean acceptance length in tokens, without the bonus token.
        speedup: Upper bound, see ``speedup``.
    """

    line: str
    draft_length: int
    accepted: float
    speedup: float


def grid(
    exponent_bits: Iterable[int], mantissa_bits: Iterable[int], block: int
) -> list[str]:
    """Return the lines of every bit-width pair that fits a byte, most bits first."""
    pairs = sorted(
        (
            (exponent, mantissa)
            for exponent in set(exponent_bits)
            for mantissa in set(mantissa_bits)
            if LEAST_BITS + exponent + mantissa <= 8
        ),
        key=lambda pair: (-sum(pair), -pair[0]),
    )
    default = "" if block == 64 else f",block={block}"
    return [
        f"split-planes:exponent_bits={e},mantissa_bits={m}{default}" for e, m in pairs
    ]


def measure(
    subject: Subject, line: str, readings: Sequence[Reading], lengths: Sequence[int]
) -> Point:
    """Encode the prompts of all readings and draft on the decoded KV.

    Args:
        subject: The model that made the readings.
        line: See ``create_codec``.
        readings: Prompts with full KV and answers, at least one.
        lengths: Draft lengths, in tokens.

    Raises:
        ConfigError: See ``create_codec``.
        CompressionError: The codec refuses the line or the KV.
        InvariantError: Draft KV and residual KV do not restore the full KV.
    """
    codec = create_codec(line)
    if codec.needs.rope:
        codec = codec.bind(subject.rope())
    sizes = torch.zeros(3, dtype=torch.float64)  # draft, residual, KV; in bytes
    errors = torch.zeros(2, 2, dtype=torch.float64)  # keys, values; error, norm
    cycles = dict.fromkeys(lengths, Cycles())
    for reading in readings:
        drafts = []
        for layer, exact in enumerate(reading.prompt_kv()):
            draft, residual = _encode(codec, layer, exact, reading)
            sizes += torch.tensor(
                [draft.nbytes, residual.nbytes, draft.part_shape.raw_bytes]
            )
            drafts.append(KV(*codec.decode(draft)))
            errors += _squares(drafts[-1], exact)
        for length in lengths:
            cycles[length] += replay(subject, reading, drafts, length)
    key, value = (errors[:, 0] / errors[:, 1].clamp(min=1e-30)).sqrt().tolist()
    stays, travels = (sizes[:2] / sizes[2]).tolist()
    return Point(line, stays, travels, key, value, cycles)


def _encode(
    codec: Codec, layer: int, exact: KV, reading: Reading
) -> tuple[PartSpec, PartSpec]:
    """Encode one layer and check that it restores exactly.

    Raises:
        InvariantError: It does not.
    """
    keys, values = (entries.contiguous() for entries in exact)
    sinks = None
    if codec.needs.resid_in:
        sinks = reading.sinks[layer].to(keys.device)
    positions = torch.arange(keys.shape[1], device=keys.device)
    draft, residual = codec.encode(
        keys, values, layer=layer, positions=positions, sinks=sinks
    )
    integer = FORMATS[keys.dtype].integer
    for entries, joined in zip(
        (keys, values), codec.join(draft, residual), strict=True
    ):
        if not torch.equal(joined.view(integer), entries.view(integer)):
            raise InvariantError(f"{codec.identity}: layer {layer} is not restored")
    return draft, residual


def _squares(near: KV, exact: KV) -> torch.Tensor:
    """Return squared error and squared norm of keys and values, [2, 2] float64."""
    found = []
    for guess, entries in zip(near, exact, strict=True):
        wide = entries.double()
        found += [(guess.double() - wide).square().sum(), wide.square().sum()]
    return torch.stack(found).view(2, 2).cpu()


def speedup(point: Point, length: int, ratio: float) -> float:
    """Return the upper bound of the speedup over KV-bound full-KV decoding.

    The unit of time is one read of the full KV from device memory. A draft-verify cycle
    of x draft tokens reads ``x * keep + 1`` and prefetches the residual KV in
    ``transfer / ratio``; the two overlap. The cycle emits its accepted tokens and a
    bonus token (arXiv:2605.17613, Eq. t_iter and appendix A.1, weights left out).

    Args:
        point: Measurements of the codec.
        length: x, a draft length in ``point.cycles``.
        ratio: Bandwidth of the host link over that of device memory, > 0.

    Raises:
        ConfigError: The ratio is not above 0.
    """
    machine = Machine(
        name="--link-gbps / --memory-gbps",
        memory_bytes=1.0,
        hbm_bytes_per_s=1.0,
        link_bytes_per_s=ratio,
        flops_per_s=1.0,
    )
    cycle_of = (length, point.cycles[length].mean)
    ceiling = roofline(machine, 1.0, point.keep, cycle_of, point.transfer)
    return ceiling.tokens_per_s / ceiling.full_kv_tokens_per_s


def choose(points: Sequence[Point], ratio: float) -> PlaneChoice:
    """Return the point and draft length of the highest ``speedup``.

    Ties go to the smaller draft KV, then to the shorter draft length.

    Args:
        points: Measured codecs, at least one, with at least one draft length.
        ratio: See ``speedup``.
    """
    found = [
        (speedup(point, length, ratio), -point.keep, -length, point)
        for point in points
        for length in point.cycles
    ]
    most, _, length, point = max(found, key=lambda entry: entry[:3])
    return PlaneChoice(point.line, -length, point.cycles[-length].mean, most)
