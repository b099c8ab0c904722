"""Throughput of one server that drafts, prefetches and verifies (appendix A.1).

arXiv:2605.17613, equations kv_avg, mem_constraint, t_gpu, t_xfer, load_constraint and
opt. One departure: as printed, t_xfer divides by the cycles per load l although
load_constraint already limits the link to one prefetch at a time, so that the implied
bandwidth exceeds the link's (10 requests, x = 29, l = 3: by a factor of three). By
default a prefetch takes bytes / link here, as in the paper's own Eq. (t_iter), and l
follows from it; ``printed_transfer`` uses the printed equation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.planning.acceptance import AcceptanceCurve
    from vericache_sglang.planning.hardware import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerDrafter:
    """A drafter whose proposals the model checks in every forward, as EAGLE3.

    Appendix A.3 multiplies the accepted length of a cycle by m. A cycle still drafts x
    tokens, and m divides the iterations they take: verifications come more often, so
    that the mean KV read and the transfers per iteration rise. The default proposes
    nothing.

    Attributes:
        length: k, proposals per row and forward, >= 0.
        accept: alpha, probability that a proposal is accepted, in [0, 1].
        weight_bytes: Read once per proposal.
        kv_bytes: Read per proposal and request.
    """

    length: int = 0
    accept: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0

    @property
    def tokens(self) -> float:
        """m, expected tokens of a row per forward, >= 1."""
        return sum(self.accept**i for i in range(self.length + 1))

    def iterations(self, draft_length: int) -> float:
        """Return n = x / m, the forwards that draft ``draft_length`` tokens."""
        return draft_length / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerModel:
    """Parameters that stay fixed during the search.

    Attributes:
        machine: Rates and memory.
        weight_bytes: M.
        kv_bytes: Full KV of a request, in bytes, > 0; equal for all requests.
        concurrency: Most concurrent requests, >= 1; None: no limit.
        acceptance: gamma(x, c) times x.
        flops_per_token: Operations of a forward without attention; 0 ignores compute.
        staging_bytes: Device memory of the staging buffer; None: the mean in use, as in
            the paper.
        most_verifies: Most requests verified per iteration; None: no limit.
        printed_transfer: Whether to compute t_xfer as printed; see the module.
        inner: Proposes tokens to every row.
    """

    machine: Machine
    weight_bytes: float
    kv_bytes: float
    concurrency: int | None = None
    acceptance: AcceptanceCurve
    flops_per_token: float = 0.0
    staging_bytes: float | None = None
    most_verifies: int | None = None
    printed_transfer: bool = False
    inner: InnerDrafter = field(default_factory=InnerDrafter)

    def fitting(self, room_bytes: float, share: float = 1.0, skip: int = 0) -> int:
        """Return the whole number of requests that fit into ``room_bytes``.

        Args:
            room_bytes: Device memory for them, in bytes; below 0 nothing fits.
            share: Part of its full KV that each of them occupies, > 0.
            skip: Other requests that count towards ``concurrency``.
        """
        count = int(max(0.0, room_bytes) // (self.kv_bytes * share))
        if self.concurrency is not None:
            count = min(count, self.concurrency - skip)
        return max(0, count)

    def verified(self, count: int, draft_length: int) -> int:
        """Return how many of ``count`` requests ``most_verifies`` lets draft."""
        if self.most_verifies is None:
            return count
        cycle = self.inner.iterations(draft_length) + 1
        return min(count, int(self.most_verifies * cycle))


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraChoice:
    """The knobs of the paper's optimisation.

    Attributes:
        resident: B_g, requests whose full KV stays on the device.
        offloaded: B_c, requests whose full KV is prefetched to verify.
        draft_length: x, in tokens; 0 decodes on the full KV without drafting.
        keep: c, in (0, 1].
        transfer_fraction: Part of the full KV prefetched per verification, >= 0: 1 - c
            for residual KV beside draft KV, 1 for a lossy codec.
        copied: Part of its full KV that each resident request holds a second time,
            >= 0: ours have their draft KV beside the full KV.
    """

    resident: int
    offloaded: int
    draft_length: int
    keep: float
    transfer_fraction: float
    copied: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted times, memory and throughput of a choice.

    Attributes:
        hbm_s: Device memory time of one iteration, in seconds (T_gpu of the paper).
        compute_s: Arithmetic time of one iteration, in seconds.
        link_s: Link time of one iteration, in seconds (T_xfer).
        cycles_per_load: l, iterations that one prefetch spans; 0 without prefetches.
        used_bytes: Device memory in use: the left side of the memory constraint.
        accepted: Accepted drafts per cycle of ``choice.draft_length``, without the
            bonus token.
        tokens_per_s: Throughput of all requests.
        binds: Limiting resource: "hbm", "link", "compute" or "memory".
    """

    choice: IntraChoice
    hbm_s: float
    compute_s: float
    link_s: float
    cycles_per_load: int
    used_bytes: float
    accepted: float
    tokens_per_s: float
    binds: str

    @property
    def requests(self) -> int:
        """B, the concurrent requests."""
        return self.choice.resident + self.choice.offloaded

    @property
    def iteration_s(self) -> float:
        """T_iter in seconds; reads, arithmetic and transfers overlap."""
        return max(self.hbm_s, self.compute_s, self.link_s)


TransferFraction = Callable[[float], float]


def split_residual(keep: float) -> float:
    """Return the transfer fraction of residual KV beside draft KV: 1 - c."""
    return 1 - keep


def mean_share(keep: float, iterations: float) -> float:
    """Return KV_avg / KV_full, Eq. (kv_avg): n draft iterations at c, one at 1."""
    return (iterations * keep + 1) / (iterations + 1)


def used_bytes(server: ServerModel, choice: IntraChoice) -> float:
    """Return the left side of Eq. (mem_constraint), in bytes."""
    staging, share = _footprint(server, choice.keep, choice.draft_length)
    if not choice.offloaded:
        staging = 0.0
    whole = choice.resident * (1.0 + choice.copied) + choice.offloaded * share
    return server.weight_bytes + staging + whole * server.kv_bytes


def estimate(server: ServerModel, choice: IntraChoice) -> Estimate:
    """Return times, memory and throughput of one choice; 0 requests give 0 tokens.

    The memory constraint is not checked; ``search`` proposes only choices that fit.
    """
    x, total = choice.draft_length, choice.resident + choice.offloaded
    machine, inner, kv_all = server.machine, server.inner, total * server.kv_bytes
    drafting, k = inner.iterations(x), inner.length
    accepted = server.acceptance.accepted(x, choice.keep) if x else 0.0
    share = mean_share(choice.keep, drafting)
    proposing = k * (inner.weight_bytes + total * inner.kv_bytes)
    read = server.weight_bytes + kv_all * share + proposing
    hbm_s = read / machine.hbm_bytes_per_s
    # k + 1 tokens per row; each verification has x drafts too.
    passes = total * (1 + k + x / (drafting + 1))
    compute_s = passes * server.flops_per_token / machine.flops_per_s
    gpu_s = max(hbm_s, compute_s)
    link_s, cycles = _transfer(server, choice, gpu_s)
    # Proposals of a verification count where all drafts before them were accepted.
    shorter = server.acceptance.accepted(x - 1, choice.keep) if x > 1 else 0.0
    bonus = 1 + (accepted - shorter if x else 1.0) * (inner.tokens - 1)
    tokens = total * (accepted + bonus) / (drafting + 1)
    return Estimate(
        choice=choice,
        hbm_s=hbm_s,
        compute_s=compute_s,
        link_s=link_s,
        cycles_per_load=cycles,
        used_bytes=used_bytes(server, choice),
        accepted=accepted,
        tokens_per_s=tokens / max(gpu_s, link_s),
        binds=_binding(server, choice, (hbm_s, compute_s, link_s)),
    )


def full_kv(server: ServerModel) -> Estimate:
    """Return the baseline: as many full KVs as fit, autoregressive decoding."""
    room = server.machine.memory_bytes - server.weight_bytes
    return estimate(
        server,
        IntraChoice(
            resident=server.fitting(room),
            offloaded=0,
            draft_length=0,
            keep=1.0,
            transfer_fraction=0.0,
        ),
    )


def resident_drafts(
    server: ServerModel, keep: float, lengths: Iterable[int], copied: float = 0.0
) -> Estimate:
    """Return the best estimate of drafts over resident KV, as in SparseSpec.

    Args:
        copied: As in ``IntraChoice``.
    """
    room = server.machine.memory_bytes - server.weight_bytes
    most = server.fitting(room, 1.0 + copied)
    return max(
        (
            estimate(
                server,
                IntraChoice(
                    resident=server.verified(most, x),
                    offloaded=0,
                    draft_length=x,
                    keep=keep,
                    transfer_fraction=0.0,
                    copied=copied,
                ),
            )
            for x in lengths
        ),
        key=lambda found: found.tokens_per_s,
    )


def search(
    server: ServerModel,
    keeps: Iterable[float],
    lengths: Iterable[int],
    *,
    resident: Iterable[int] | None = None,
    transfer_fraction: TransferFraction = split_residual,
) -> Estimate:
    """Return the choice of highest throughput, Eq. (opt).

    Every (c, x, B_g) is evaluated. Throughput rises with B_c until the link time
    exceeds the GPU time and never rises beyond, so only that B_c, its neighbour and the
    largest that fits are evaluated.

    Args:
        server: See ``ServerModel``.
        keeps: Candidates for c, each in (0, 1].
        lengths: Candidates for x, each >= 1.
        resident: Candidates for B_g; None: every count that fits. ``[0]`` is a server
            that offloads all requests.
        transfer_fraction: c -> part of the full KV that is prefetched.

    Returns:
        The best estimate, the first of equal ones; 0 tokens/s if nothing fits.
    """
    counts = list(range(full_kv(server).requests + 1) if resident is None else resident)
    lengths = list(lengths)
    return max(
        (
            estimate(server, choice)
            for keep in keeps
            for x in lengths
            for held in counts
            for choice in _choices(server, keep, x, held, transfer_fraction(keep))
        ),
        key=lambda found: found.tokens_per_s,
    )


def most_offloaded(
    server: ServerModel, keep: float, draft_length: int, held: int
) -> int:
    """Return the largest B_c allowed by memory, link and concurrency."""
    staging, share = _footprint(server, keep, draft_length)
    taken = server.weight_bytes + held * server.kv_bytes
    room = server.machine.memory_bytes - taken - staging
    count = server.verified(server.fitting(room, share, skip=held), draft_length)
    if server.printed_transfer:  # load_constraint at its smallest l, 1
        count = min(count, draft_length + 1)
    return count


def _choices(
    server: ServerModel, keep: float, x: int, held: int, fraction: float
) -> Iterable[IntraChoice]:
    def choice(offloaded: int) -> IntraChoice:
        return IntraChoice(
            resident=held,
            offloaded=offloaded,
            draft_length=x,
            keep=keep,
            transfer_fraction=fraction,
        )

    most = most_offloaded(server, keep, x, held)
    low, high = 0, most
    while low < high:  # the first B_c whose link time exceeds the GPU time
        middle = (low + high) // 2
        found = estimate(server, choice(middle))
        if found.link_s >= max(found.hbm_s, found.compute_s):
            high = middle
        else:
            low = middle + 1
    tried = range(most + 1) if server.printed_transfer else {0, low - 1, low, most}
    return [choice(count) for count in tried if count >= 0]


def _footprint(
    server: ServerModel, keep: float, draft_length: int
) -> tuple[float, float]:
    if server.staging_bytes is None:
        return 0.0, mean_share(keep, server.inner.iterations(draft_length))
    return server.staging_bytes, keep


def _transfer(
    server: ServerModel, choice: IntraChoice, gpu_s: float
) -> tuple[float, int]:
    if not choice.offloaded or not choice.transfer_fraction:
        return 0.0, 0
    offloaded = choice.offloaded * server.kv_bytes
    cycle = server.inner.iterations(choice.draft_length) + 1
    moved = offloaded * choice.transfer_fraction / cycle
    link_s = moved / server.machine.link_bytes_per_s
    if server.printed_transfer:
        # Largest l that load_constraint allows: t_xfer decreases with l.
        cycles = max(1, floor(cycle / choice.offloaded))
        return link_s / cycles, cycles
    one_load_s = link_s * cycle / choice.offloaded
    return link_s, ceil(one_load_s / max(gpu_s, link_s))


def _binding(
    server: ServerModel, choice: IntraChoice, times_s: tuple[float, float, float]
) -> str:
    hbm_s, compute_s, link_s = times_s
    if link_s >= max(hbm_s, compute_s):
        return "link"
    if compute_s > hbm_s:
        return "compute"
    # Reads of weights are shared: while they dominate an iteration, one more request
    # would cost little, so that memory is the limit.
    weights_s = server.weight_bytes / server.machine.hbm_bytes_per_s
    grown = "offloaded" if choice.offloaded else "resident"
    more = replace(choice, **{grown: getattr(choice, grown) + 1})
    full = used_bytes(server, more) > server.machine.memory_bytes
    return "memory" if full and weights_s > hbm_s / 2 else "hbm"
