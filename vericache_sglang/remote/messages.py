"""The messages between drafters and verifiers, and their encoding.

MessagePack arrays with an integer tag first; tokens are little-endian u32 in a byte
string. Times are durations, never timestamps: the clocks of two machines may differ.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from vericache_sglang.errors import MessageError
from vericache_sglang.scheduling.iteration_model import LONGEST_S

if TYPE_CHECKING:
    from collections.abc import Iterable

PROTOCOL = 5
"""Version of the messages; other versions are refused."""

LONGEST = 16 << 20
"""Most bytes of a message."""

CHANGED = "weights that were changed while serving"
"""Fingerprint after new weights; differs from every drafter's and verifier's."""

U16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U64 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Numbers of 63 bits at most: msgspec bounds signed integers only."""
Instance = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=LONGEST)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]


class Logprobs(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True
):
    """Log-probabilities at one output token, as SGLang has them.

    Attributes:
        value: That of the token.
        top: Values and ids of the most probable tokens; empty if not requested.
        chosen: Values and ids of the requested tokens; empty if not requested.
    """

    value: float
    top: tuple[tuple[float, ...], tuple[U32, ...]] = ((), ())
    chosen: tuple[tuple[float, ...], tuple[U32, ...]] = ((), ())


class WantedLogprobs(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True
):
    """Which log-probabilities a request asks for, besides those of its tokens.

    Attributes:
        top: Number of most probable tokens.
        chosen: Ids of tokens; None: of none.
    """

    top: U16
    chosen: tuple[U32, ...] | None


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A message; subclasses add a tag and fields."""


class Hello(Message, tag=1):
    """A drafter introduces itself; repeated until it is answered.

    Attributes:
        instance: Random identity of the process.
        protocol: ``PROTOCOL``.
        sglang: Version of SGLang.
        package: Version of this package.
        fingerprint: Identity of model, weights and dtypes.
        vocabulary: Number of token ids.
        sampling: SGLang's settings on which a sampled token depends.
    """

    instance: Instance
    protocol: U16
    sglang: Text
    package: Text
    fingerprint: Text
    vocabulary: U32
    sampling: Text


class Welcome(Message, tag=2):
    """A verifier serves this drafter."""


class Refuse(Message, tag=3):
    """A verifier does not serve this drafter; it may ask again."""

    reason: Text


class Open(Message, tag=10):
    """A drafter asks for the tokens of a request from ``committed`` on.

    Attributes:
        rid: Number of the request, unique in the drafter's process.
        epoch: Number of this attempt; a higher one replaces a lower one.
        prompt: Tokens of the prompt.
        params: SGLang's ``SamplingParams``, as MessagePack.
        committed: Output tokens so far.
        wanted: Log-probabilities to send with tokens; None: none.
    """

    rid: U64
    epoch: U32
    prompt: Tokens
    params: bytes
    committed: Tokens
    wanted: WantedLogprobs | None = None


class Busy(Message, tag=12):
    """A verifier does not take a request now.

    Attributes:
        retry_ms: Time after which another request may be tried, in milliseconds.
    """

    rid: U64
    epoch: U32
    retry_ms: U32
    reason: Text


class Prepare(Message, tag=13):
    """A drafter announces its next drafts, so that the KV to verify them is there.

    Attributes:
        base: Output tokens before the drafts.
        eta_ms: Time until they are expected, in milliseconds.
    """

    rid: U64
    epoch: U32
    base: U32
    eta_ms: U32


class VerifyDrafts(Message, tag=14):
    """A drafter asks which token follows ``base`` and each of its drafts.

    From the first one on, a verifier computes no tokens of the request unasked, until
    a ``Resend``.

    Attributes:
        base: Output tokens before the drafts. Where the verifier has more already, the
            answer is these.
        drafts: Any number, also none: the answer then is the token behind ``base``.
    """

    rid: U64
    epoch: U32
    base: U32
    drafts: Tokens


class Verdict(Message, tag=15):
    """Output tokens of a request, correct and final.

    Attributes:
        base: Output tokens before these.
        tokens: Any number, also none: the verifier serves the request and is at
            ``base``.
        finished: The verifier considers the request finished after them.
        logprobs: One per token if the request wants them, else none.
    """

    rid: U64
    epoch: U32
    base: U32
    tokens: Tokens
    finished: bool
    logprobs: tuple[Logprobs, ...] = ()


class Unknown(Message, tag=16):
    """A verifier does not have, or no longer has, this attempt of a request."""

    rid: U64
    epoch: U32


class Close(Message, tag=17):
    """A drafter needs no more tokens of a request, in this or an earlier attempt."""

    rid: U64
    epoch: U32


class Resend(Message, tag=18):
    """A drafter asks for every token from ``base`` on, without drafting any."""

    rid: U64
    epoch: U32
    base: U32


class Measured(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True
):
    """What a verifier was measured to take, for the choice of paths; times in seconds.

    Attributes:
        drafters: That have requests there.
        slots: Tokens that its KV pool holds.
        base_s: A forward without its rows, see ``Coefficients``.
        per_token_s: Of it, per token.
        per_read_s: Per KV slot read.
        per_product_s: Per token and KV slot.
        prompt_s: Prefill, per prompt token.
        load_s: Link from its store, per prompt token.
    """

    drafters: U32
    slots: U64
    base_s: Seconds
    per_token_s: Seconds
    per_read_s: Seconds
    per_product_s: Seconds
    prompt_s: Seconds
    load_s: Seconds


class Heartbeat(Message, tag=20):
    """Sent by both sides several times a second.

    Attributes:
        sequence: Increases; a repeated one proves life and says nothing new.
        live: Requests that a drafter has open at this verifier; empty from a verifier.
        measured: Of a verifier; None from a drafter, or before the first forward.
    """

    sequence: U64
    live: Annotated[tuple[U64, ...], msgspec.Meta(max_length=1 << 16)]
    measured: Measured | None = None


ToVerifier = Hello | Open | Prepare | VerifyDrafts | Close | Resend | Heartbeat
ToDrafter = Welcome | Refuse | Busy | Verdict | Unknown | Heartbeat

_ENCODER = msgspec.msgpack.Encoder()
_TO_VERIFIER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToVerifier)
_TO_DRAFTER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToDrafter)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _ENCODER.encode(message)


def decode_to_verifier(data: bytes) -> ToVerifier:
    """Return the message in ``data``.

    Raises:
        MessageError: It is none that a verifier gets.
    """
    found: ToVerifier = _decode(data, _TO_VERIFIER)
    return found


def decode_to_drafter(data: bytes) -> ToDrafter:
    """Return the message in ``data``.

    Raises:
        MessageError: It is none that a drafter gets.
    """
    found: ToDrafter = _decode(data, _TO_DRAFTER)
    return found


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(str(error)) from error


def pack(tokens: Iterable[int]) -> bytes:
    """Return tokens as little-endian u32."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack(data: bytes) -> array[int]:
    """Return the tokens of ``pack``, in an array of the kind that SGLang has.

    Raises:
        MessageError: The length is no multiple of 4.
    """
    if len(data) % 4:
        raise MessageError(f"{len(data)} bytes are no tokens of 4 bytes")
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return array("q", ids)
