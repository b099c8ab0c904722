"""Where the host still waits for the device, and why it does."""

from fnmatch import fnmatch
from typing import NamedTuple

from fake_cuda import Wait

PACKAGE = "vericache_sglang/"


class Known(NamedTuple):
    """A wait that is expected.

    Attributes:
        where: File below the package, and function.
        why: As ``Wait.why``.
        when: Patterns of the scenarios in which it occurs: in each of them.
        reason: Why it is there.
        via: As ``Wait.via``.
    """

    where: str
    why: str
    when: tuple[str, ...]
    reason: str
    via: str = ""


SCORES = "scores lie beside a prefix with a checksum: one copy for all its segments"

KNOWN = (
    # -- at boot and at the end ------------------------------------------------------
    Known(
        "kv/sglang_pools.py::staged_pool_class.<locals>"
        ".StagedMHATokenToKVPool._create_buffers",
        "copy from host, pageable",
        ("boot",),
        "SGLang's pool keeps its buffers' addresses on the device; once, at boot",
        "MHATokenToKVPool._init_data_ptrs_and_strides",
    ),
    Known(
        "kv/stream_transfers.py::StreamTransfers.close",
        "stream",
        ("boot",),
        "the copies under way end before the process does",
    ),
    Known(
        "kv/calibration.py::seconds_of",
        "event",
        ("boot: time iterations",),
        "attention is timed between two events; once, at boot",
    ),
    # -- in the loop -----------------------------------------------------------------
    Known(
        "runtime/in_flight.py::InFlightForward.outcome",
        "event",
        ("loop: *", "*draft and verify"),
        "the forward before the one that runs: SGLang has copied its tokens",
    ),
    Known(
        "device/upload.py::download",
        "stream",
        ("loop: the first compressions",),
        "moves copy KV whose place depends on every outcome",
    ),
    Known(
        "device/upload.py::download",
        "stream",
        ("asking*",),
        "the next token depends on this one in ways the host computes; once a forward",
    ),
    # -- compressing -----------------------------------------------------------------
    Known(
        "compression/random_tokens.py::RandomTokens.scores",
        "copy from host, pageable",
        ("selector random: compress to host",),
        "a baseline that draws the same numbers on every machine",
    ),
    # -- prefixes --------------------------------------------------------------------
    Known(
        "prefix_cache/compress.py::PromptCompressor._save_scores",
        "copy to host, pageable",
        ("shared: compress to host", "shared: offload"),
        SCORES,
    ),
    Known(
        "prefix_cache/segment_copies.py::SegmentCopies._keep_scores",
        "copy to host, pageable",
        ("prefix: evict what is compressed",),
        SCORES,
    ),
    Known(
        "prefix_cache/segment_slots.py::SegmentSlots.leave",
        "tolist",
        ("prefix: evict*",),
        "which segments lose a slot is asked once for all that the tree gives up",
    ),
)


def expected(scenario):
    """Return the waits that are known to occur in a scenario."""
    return {
        Wait(PACKAGE + known.where, known.why, known.via)
        for known in KNOWN
        if any(fnmatch(scenario, pattern) for pattern in known.when)
    }
