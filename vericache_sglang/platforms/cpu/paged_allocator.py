"""SGLang's paged slot allocator in torch, for machines without Triton."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import (
    PagedTokenToKVPoolAllocator,
    alloc_extend_naive,
)


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """The base class without its Triton kernels; a failed allocation takes nothing.

    Shapes: B requests. A request's last page is filled before it gets new pages.
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
        """Allocate the slots of entries [prefix, seq) of every request.

        Args:
            prefix_lens: [B] int64, tokens that already have slots.
            prefix_lens_cpu: As ``prefix_lens``, on the host.
            seq_lens: [B] int64, tokens that have slots afterwards.
            seq_lens_cpu: As ``seq_lens``, on the host.
            last_loc: [B] slot of the last prefix token, -1 without a prefix.
            extend_num_tokens: Sum of seq - prefix, in tokens.
            num_new_pages: Pages needed, if the caller has counted them.

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
        # Limited to the counted pages, so that a wrong count cannot take more.
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
        """Allocate the slot of every request's last entry.

        Args:
            seq_lens: [B] int64, tokens including the new one.
            seq_lens_cpu: As ``seq_lens``, on the host.
            last_loc: [B] slot of the preceding token.

        Returns:
            [B] int64, or None if it does not fit.
        """
        return self.alloc_extend(
            *(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc),
            extend_num_tokens=len(seq_lens),
        )

    def _pages(self, lengths: torch.Tensor) -> int:
        """Return the number of full and partial pages of rows of ``lengths`` tokens."""
        return int((-(-lengths // self.page_size)).sum())
