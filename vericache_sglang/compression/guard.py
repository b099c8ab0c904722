"""Guards calls into third-party compressors: no failure ends the server.

Draft KV may have any content, because verification corrects it. So the result of a
failed call is replaced by a well-formed one, and its request decodes autoregressively.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.compression.base import Selector
from vericache_sglang.compression.codecs.base import Codec, PartSpec, check_kv
from vericache_sglang.errors import CompressionError, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vericache_sglang.compression.base import Probe, Step
    from vericache_sglang.compression.codecs.base import Layout

logger = logging.getLogger(__name__)

LONGEST_S = 0.9
"""Time limit of a call in seconds; a longer call counts as failed, its result stays."""
LONGEST_S_PER_TOKEN = 1e-4
"""Addition to ``LONGEST_S`` per token of the call, in seconds."""
FIRST_S = 10.0
"""Addition to ``LONGEST_S`` for the first call of a name, in seconds: kernels are
compiled and loaded in it (1.1 s seen on an H200)."""
MOST_FAILURES = 8
"""Failed requests after which a method is disabled."""


class CompressorGuard:
    """Guards the calls of one selector and one codec.

    Args:
        method: The ``--vericache-compressor`` line, for messages.
        heads: KV heads of this rank.

    Attributes:
        vocabulary: Exclusive upper bound of the token ids of probes.
        errors: Number of failed calls by method name.
        failures: Number of requests that decode autoregressively after a failed call.
    """

    def __init__(self, method: str, heads: int) -> None:
        self.errors: Counter[str] = Counter()
        self.failures = 0
        self.vocabulary = 1 << 31
        self._method = method
        self._heads = heads
        self._failed: set[str] = set()
        self._called: set[str] = set()
        self._rid = ""

    @property
    def off(self) -> bool:
        """Whether the method is disabled, so that no prompt is compressed."""
        return self.failures >= MOST_FAILURES

    def wrap(self, part: Selector | Codec) -> None:
        """Guard every later call of a part by wrapping its methods in place."""
        if isinstance(part, Selector):
            calls: dict[str, Callable[..., Any]] = {
                name: getattr(self, f"_{name}") for name in SELECTOR_CALLS
            }
        else:
            calls = {name: partial(getattr(self, f"_{name}"), part) for name in CODEC}
        for name, guarded in calls.items():
            # Set on the instance: the class may be shared, and may be frozen.
            object.__setattr__(part, name, partial(guarded, getattr(part, name)))

    def sound(self, rid: str) -> bool:
        """Return whether no call for a request has failed."""
        return rid not in self._failed

    def abandon(self, rid: str) -> None:
        """Count a request that decodes autoregressively because a call failed."""
        self.forget(rid)
        self.failures += 1
        if self.failures == MOST_FAILURES:
            logger.error(
                "VeriCache: compressor %s is switched off after %d failed requests; "
                "every further one decodes autoregressively",
                self._method,
                MOST_FAILURES,
            )

    def forget(self, rid: str) -> None:
        """Drop the state of a request."""
        self._failed.discard(rid)

    @contextmanager
    def request(self, rid: str) -> Iterator[None]:
        """Set the request to which calls without a request id are attributed."""
        before, self._rid = self._rid, rid
        try:
            yield
        finally:
            self._rid = before

    def report(self) -> dict[str, int | str]:
        """Return the counts of failed calls and requests, by report key."""
        calls = {f"compressor_errors_{call}": self.errors[call] for call in CALLS}
        return {
            **calls,
            "compressor_failures": self.failures,
            "compressor_line": self._method,
        }

    # -- the calls --------------------------------------------------------------

    def _open(self, call: Callable[..., Any], rid: str) -> None:
        self._try("open", lambda: call(rid), rid)

    def _close(self, call: Callable[..., Any], rid: str) -> None:
        self._try("close", lambda: call(rid))

    def _update(self, call: Callable[..., Any], step: Step) -> torch.Tensor | None:
        def right(scores: Any) -> None:
            if scores is not None and step.queries is not None:
                require(scores, (self._heads, step.queries.shape[1]))

        done, scores = self._try("update", lambda: call(step), step.rid, check=right)
        return scores if done else None

    def _probes(
        self, call: Callable[..., Any], rid: str, prompt: Sequence[int]
    ) -> Sequence[Probe]:
        def right(probes: Any) -> None:
            for probe in probes:
                tokens = probe.tokens
                if not tokens or not all(0 <= t < self.vocabulary for t in tokens):
                    raise CompressionError(f"tokens of a probe: {quoted(tokens)}")

        def called() -> Sequence[Probe]:
            return tuple(call(rid, prompt))

        done, probes = self._try("probes", called, rid, len(prompt), right)
        return probes if done else ()

    def _observe(
        self, call: Callable[..., Any], rid: str, probe: Probe, layer: Any
    ) -> None:
        tokens = layer.keys.shape[1]
        self._try("observe", lambda: call(rid, probe, layer), rid, tokens)

    def _keep_share(
        self, call: Callable[..., Any], noted: Sequence[torch.Tensor]
    ) -> float | None:
        def right(share: Any) -> None:
            if share is not None and not 0 < share <= 1:
                raise CompressionError(f"a share to keep: {quoted(share)}")

        done, share = self._try("keep_share", lambda: call(noted), check=right)
        return None if not done or share is None else float(share)

    def _scores(
        self,
        call: Callable[..., Any],
        rid: str,
        layer: int,
        keys: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        shape = tuple(keys.shape[:2])
        done, scores = self._try(
            "scores",
            lambda: call(rid, layer, keys, *rest),
            rid,
            shape[1],
            lambda scores: require(scores, shape),
        )
        if not done:
            return torch.zeros(shape, device=keys.device)
        found: torch.Tensor = scores.to(keys.device)
        return found

    def _encode_draft(
        self,
        codec: Codec,
        call: Callable[..., Any],
        keys: torch.Tensor,
        values: torch.Tensor,
        **given: Any,
    ) -> PartSpec:
        done, part = self._try(
            "encode_draft",
            lambda: call(keys, values, **given),
            tokens=keys.shape[1],
            check=lambda part: require_layout(
                part, codec.draft_layout(part.part_shape)
            ),
        )
        if done:
            found: PartSpec = part
            return found
        kv = check_kv(keys, values)
        zeros = {
            name: torch.zeros(shape, dtype=dtype, device=keys.device)
            for name, (dtype, shape) in codec.draft_layout(kv).items()
        }
        layer, positions = given.get("layer", 0), given.get("positions")
        return PartSpec(codec.identity, kv, layer, positions, zeros)

    def _decode(
        self, codec: Codec, call: Callable[..., Any], draft: PartSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv = draft.part_shape
        shapes = [(kv.heads, kv.tokens, dim) for dim in (kv.key_dim, kv.value_dim)]

        def right(decoded: Any) -> None:
            for entries, shape in zip(decoded, shapes, strict=True):
                require(entries, shape, kv.dtype)

        done, decoded = self._try(
            "decode", lambda: call(draft), tokens=kv.tokens, check=right
        )
        if done:
            return decoded[0], decoded[1]
        device = next(iter(draft.tensors.values())).device
        zeros = [torch.zeros(s, dtype=kv.dtype, device=device) for s in shapes]
        return zeros[0], zeros[1]

    def _try(
        self,
        name: str,
        call: Callable[[], Any],
        rid: str = "",
        tokens: int = 0,
        check: Callable[[Any], None] = lambda made: None,
    ) -> tuple[bool, Any]:
        """Make a call; return whether its result is usable, and the result."""
        began = time.perf_counter()
        try:
            made = call()
            check(made)
        except torch.AcceleratorError:
            raise  # the device is lost, whoever asked it last
        except (Exception, SystemExit) as error:  # noqa: BLE001 (third-party code)
            self._note(name, rid, error)
            return False, None
        seconds = time.perf_counter() - began
        longest = LONGEST_S + tokens * LONGEST_S_PER_TOKEN
        if name not in self._called:
            longest += FIRST_S
            self._called.add(name)
        if seconds > longest:
            self._note(name, rid, CompressionError(f"it took {seconds:.1f} s"))
        return True, made

    def _note(self, name: str, rid: str, error: BaseException) -> None:
        rid = rid or self._rid
        if rid and name != "close":
            self._failed.add(rid)
        self.errors[name] += 1
        if self.errors[name] == 1:
            logger.error(
                "VeriCache: compressor %s, %s: %s",
                self._method,
                name,
                quoted(str(error)),
                exc_info=error,
            )


SELECTOR_CALLS = (
    *("open", "close", "update", "probes", "observe"),
    *("keep_share", "scores"),
)
CODEC = ("encode_draft", "decode")
CALLS = (*SELECTOR_CALLS, *CODEC)
"""Names of the guarded methods."""


def require(
    made: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> None:
    """Require a tensor of a shape, and of a dtype or else of floating point.

    Raises:
        CompressionError: It is not such a tensor.
    """
    if not isinstance(made, torch.Tensor):
        raise CompressionError(f"wanted a tensor, got a {type(made).__name__}")
    found = tuple(made.shape)
    typed = made.dtype == dtype if dtype is not None else made.dtype.is_floating_point
    if found != shape or not typed:
        raise CompressionError(f"wanted {shape} {dtype}, got {found} {made.dtype}")


def require_layout(part: Any, layout: Layout) -> None:
    """Require that a part has the tensors of its layout.

    Raises:
        CompressionError: A tensor is missing or malformed.
    """
    found = {name: (t.dtype, tuple(t.shape)) for name, t in part.tensors.items()}
    if found != dict(layout):
        raise CompressionError(f"wanted {quoted(dict(layout))}, got {quoted(found)}")
