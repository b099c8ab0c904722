"""What other servers decide of the rows of a decode batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vericache_sglang.runtime.hosting import Hosting
from vericache_sglang.runtime.paired import PairedStarts
from vericache_sglang.runtime.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments
    from vericache_sglang.runtime.early_starts import EarlyStarts
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.remote_role import Role
    from vericache_sglang.scheduling.plan import RowAction
    from vericache_sglang.scheduling.runtime import Runtime


class RemoteRows(Protocol):
    """What ``Decoding`` asks of a drafter's or a verifier's role."""

    @property
    def busy(self) -> bool:
        """Return whether there may be such rows."""

    def actions(
        self, requests: Mapping[int, RequestState], verifies: int
    ) -> dict[int, RowAction]:
        """Return the actions that other servers decide, by index in the batch.

        Called in every iteration after its plan, which they replace. None is of a
        request that was lost, or had nothing left to emit.

        Args:
            requests: Batch index -> request.
            verifies: Verifications that the plan leaves room for; one is always made.
        """

    def wait(self) -> None:
        """Wait for other servers for a while: every request waits."""


def rows_of(
    role: Role | None,
    starts: EarlyStarts | None,
    draft_tokens: DraftTokenBuffer,
    runtime: Runtime,
    states: Mapping[str, RequestState],
    stored: StoredSegments | None,
) -> RemoteRows | None:
    """Return what decides rows of this server; None if it decides all by itself.

    Args:
        role: Its role.
        starts: Starts requests on stored draft KV.
        draft_tokens: Tokens of all requests.
        runtime: Schedules requests.
        states: rid -> running request.
        stored: Segments in the store.
    """
    if isinstance(role, Hosting):
        role.draft_tokens, role.estimates = draft_tokens, runtime.estimates
        role.stored = stored
        return role
    if isinstance(role, Relay) and isinstance(starts, PairedStarts):
        starts.attach(role, runtime, states)
        return starts
    return None
