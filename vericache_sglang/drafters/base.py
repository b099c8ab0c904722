"""Interface of inner drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from vericache_sglang.drafters.features import Features


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The rows of one forward for which tokens are proposed.

    Attributes:
        pool_idx: [n] int64, ``req_pool_idx`` of the requests.
        length: [n] int64, tokens of each text up to the last draft, or the pending
            token.
        shared: [n] int64, 1 if what other requests said may be used, else 0.
        depth: Tokens wanted per row, >= 1.
        requests: n numbers, ``pool_idx`` on the host.
        certain: n lower bounds of ``length``, on the host.
    """

    pool_idx: torch.Tensor
    length: torch.Tensor
    shared: torch.Tensor
    depth: int
    requests: Sequence[int]
    certain: Sequence[int]


class Drafter(ABC):
    """Proposes tokens; wrong ones cost time and never change an answer.

    Its methods must not wait for the device. Ranks of one server make the same calls
    and must propose the same tokens.

    Attributes:
        features: Receives what the served model computed; None if that is not read.
    """

    features: Features | None = None

    def begin(self, request: int, length: int, first: int = 0) -> None:
        """Note that a request begins to decode, in place of an earlier one.

        Args:
            request: Its ``req_pool_idx``.
            length: Tokens of its text, >= 1.
            first: First position whose features are stored, if any are.
        """

    def prepare(self) -> Collection[int]:
        """Read a piece of the texts that have begun; called before every plan.

        Returns:
            ``req_pool_idx`` of the requests for which nothing can be proposed yet.
        """
        return ()

    @abstractmethod
    def propose(self, wanted: Wanted) -> torch.Tensor:
        """Return [n, depth] integers; those that are no token ids count as no proposal.

        Called before every forward with a row that has room for proposals.
        """

    def finish(self, tokens: Sequence[int]) -> None:
        """Learn from a finished request that shares what it said.

        Args:
            tokens: The end of its prompt and its whole output.
        """
