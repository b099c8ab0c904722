"""SGLang's paged slot allocator in torch, for machines without Triton."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import (
    PagedTokenToKVPoolAllocator,
    alloc_extend_naive,
)


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """As its base, without a kernel; a refused request takes nothing.

    Shapes: B requests. A request's last page is filled before it gets new ones.
    """

    free_pages: torch.Tensor

    def alloc_extend(  # noqa: PLR0913 (SGLang's signature)
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Give every request the slots of entries [prefix, seq).

        Args:
            prefix_lens: [B] int64, in tokens, whose slots the request has.
            prefix_lens_cpu: As ``prefix_lens``, on the host.
            seq_lens: [B] int64, in tokens, whose slots it shall have.
            seq_lens_cpu: As ``seq_lens``, on the host.
            last_loc: [B] slot of the last prefix token, -1 where there is none.
            extend_num_tokens: Sum of seq - prefix, in tokens.
            num_new_pages: Pages this takes, where the caller has counted them.

        Returns:
            [extend_num_tokens] int64 in request order, or None if it does not fit.
        """
        if num_new_pages is None:
            num_new_pages = self._pages(seq_lens_cpu) - self._pages(prefix_lens_cpu)
        if num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        # Only the pages that are taken, so a wrong count cannot reach further.
        pages = self.free_pages[:num_new_pages]
        alloc_extend_naive(
            *(prefix_lens, seq_lens, last_loc, pages, slots),
            *(self.page_size, self.device),
        )
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
    ) -> torch.Tensor | None:
        """Give every request the slot of its last entry.

        Args:
            seq_lens: [B] int64, in tokens, the new one counted.
            seq_lens_cpu: As ``seq_lens``, on the host.
            last_loc: [B] slot of the token before it.

        Returns:
            [B] int64, or None if it does not fit.
        """
        return self.alloc_extend(
            *(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc),
            extend_num_tokens=len(seq_lens),
        )

    def _pages(self, lengths: torch.Tensor) -> int:
        """Count the pages that rows of ``lengths`` tokens fill or start."""
        return int((-(-lengths // self.page_size)).sum())
