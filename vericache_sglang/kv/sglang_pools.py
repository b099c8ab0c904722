"""SGLang's KV pool with a staging buffer behind the allocator's slots."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def staged_pool_class(staging_tokens: int) -> type:
    """Return a KV pool class whose buffers end in a staging buffer.

    The staging buffer starts at a page boundary behind SGLang's own slots and is
    allocated with them. ``size`` stays as SGLang set it, so allocator, admission and
    leak checks never see the staging buffer. Equal arguments give the same class.

    Instances add ``staging_start`` (first slot of the staging buffer) and
    ``staging_tokens`` to the attributes of ``MHATokenToKVPool``.

    Args:
        staging_tokens: Size of the staging buffer, in slots; 0 for none.

    Raises:
        ValueError: ``staging_tokens`` is negative.
    """
    if staging_tokens < 0:
        raise ValueError(f"staging_tokens must be >= 0, got {staging_tokens}")
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class StagedMHATokenToKVPool(MHATokenToKVPool):
        """Slots from ``staging_start`` on are the staging buffer, the others SGLang's.

        Raises:
            ValueError: A staging buffer is requested in a layout other than [slots,
                heads, dim], in a quantized pool or in one backed after capture.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.staging_tokens = staging_tokens
            super().__init__(*args, **kwargs)

        @property
        def staging_start(self) -> int:
            """First staging slot: SGLang's end rounded up to a page, in slots."""
            stock = int(self.size) + int(self.page_size)
            return -(-stock // int(self.page_size)) * int(self.page_size)

        def _create_buffers(self) -> None:
            if self.staging_tokens and (
                self.kv_cache_layout != "nhd"
                or self.is_quantized_kv_cache
                or self.post_capture_active
            ):
                raise ValueError(
                    f"no staging buffer in a KV pool of layout {self.kv_cache_layout}, "
                    f"quantized={self.is_quantized_kv_cache}, "
                    f"post-capture={self.post_capture_active}"
                )
            super()._create_buffers()

        def _kv_buffer_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
            k_shape, v_shape = super()._kv_buffer_shapes()
            if not self.staging_tokens:
                return k_shape, v_shape
            rows = self.staging_start + self.staging_tokens
            return (rows, *k_shape[1:]), (rows, *v_shape[1:])

    return StagedMHATokenToKVPool
