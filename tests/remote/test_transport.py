"""Sockets between two processes: encryption, loss, garbage, and ends of processes."""

import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
import zmq
from histories import HELLO, VOCABULARY, truth
from proxy import Proxy

from vericache_sglang.errors import ConfigError, MessageError
from vericache_sglang.evaluation.server import free_port
from vericache_sglang.observability.counters import Counters
from vericache_sglang.remote.messages import (
    Welcome,
    decode_to_drafter,
    decode_to_verifier,
    encode,
    pack,
)
from vericache_sglang.remote.owner import OwnedRequest, Owner
from vericache_sglang.remote.peer_keys import PeerKeys
from vericache_sglang.remote.quarantine import IGNORED_S, MOST_FAULTS, Quarantine
from vericache_sglang.remote.transport import DrafterTransport, VerifierTransport
from vericache_sglang.remote.verifiers import State

PROGRAM = Path(__file__).with_name("verifying.py")


@pytest.fixture
def key(tmp_path):
    return key_file(tmp_path / "peer.key")


def key_file(path):
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return str(path)


@contextmanager
def verifier(endpoint, key="off"):
    """Run a verifier's process."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), endpoint, key],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Drafter:
    """A drafter without SGLang: requests of a number of tokens each."""

    def __init__(self, *endpoints, key="off"):
        keys = PeerKeys.read(key)
        self.transport = DrafterTransport(endpoints, decode_to_drafter, keys)
        self.owner = Owner(endpoints, HELLO, 20.0, VOCABULARY, Counters())
        self.outputs = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.transport.close()

    def step(self):
        self.transport.wait(0.01)
        for which, message, at in self.transport.drain():
            self.owner.receive(which, message, at)
        for rid in self.owner.committed:
            output = self.outputs[rid]
            assert output == [truth(rid, p) for p in range(len(output))]
        self.owner.committed.clear()
        self.owner.tick(self.transport.now())
        for which, message in self.owner.outbox:
            self.transport.send(which, message)
        self.owner.outbox.clear()
        self.transport.repeat(dict(enumerate(self.owner.beats())))

    def until(self, holds, seconds=60):
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it took too long"
            self.step()

    def serving(self):
        return any(each.state is State.SERVING for each in self.owner.verifiers)

    def ask(self, rids, tokens):
        """Open requests; wait until each has so many tokens more."""
        for rid in rids:
            if rid not in self.outputs:
                request = OwnedRequest(rid, pack([rid]), b"", [])
                self.outputs[rid] = request.tokens
                assert self.owner.open(request, self.transport.now())
        wanted = {rid: len(self.outputs[rid]) + tokens for rid in rids}
        self.until(lambda: all(len(self.outputs[r]) >= n for r, n in wanted.items()))


def test_tokens_travel_encrypted_and_survive_the_verifier_s_death(key):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with Drafter(endpoint, key=key) as drafter:
        with verifier(endpoint, key):
            drafter.until(drafter.serving)
            drafter.ask(range(8), 30)
        before = {rid: list(output) for rid, output in drafter.outputs.items()}
        drafter.until(lambda: len(drafter.owner.returned) == 8)
        assert all(drafter.outputs[rid][: len(b)] == b for rid, b in before.items())
        with verifier(endpoint, key):
            drafter.until(drafter.serving)
            drafter.ask(range(8, 12), 30)


@pytest.mark.parametrize("share", [0.05, pytest.param(0.2, marks=pytest.mark.extended)])
def test_a_proxy_that_drops_repeats_and_reorders_costs_no_token(share):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with verifier(endpoint):
        proxy = Proxy(endpoint, share)
        with Drafter(proxy.endpoint) as drafter:
            drafter.until(drafter.serving)
            drafter.ask(range(4), 200)
            assert drafter.owner.returned == []
        assert proxy.altered > proxy.passed * share
        proxy.close()


@pytest.mark.parametrize("theirs", ["off", "another"])
def test_a_drafter_without_the_key_is_not_admitted(key, tmp_path, theirs):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    other = "off" if theirs == "off" else key_file(tmp_path / "other.key")
    keys = PeerKeys.read(key)
    ours = VerifierTransport(endpoint, decode_to_verifier, keys)
    with Drafter(endpoint, key=other) as stranger, Drafter(endpoint, key=key) as known:
        known.until(lambda: greet(ours))
        for _ in range(20):
            stranger.step()
        assert not stranger.serving()
        known.until(known.serving)
    ours.close()


def greet(transport):
    """Welcome whoever says hello; return whether one did."""
    found = transport.drain()
    for connection, _, _ in found:
        transport.send(connection, Welcome())
    return bool(found)


def test_garbage_on_the_port_hinders_nothing(key):
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    with verifier(endpoint, key), Drafter(endpoint, key=key) as drafter:
        drafter.until(drafter.serving)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(secrets.token_bytes(4096))
        drafter.ask(range(4), 30)


def test_a_wait_ends_where_sglang_has_a_message():
    ours = VerifierTransport(f"tcp://127.0.0.1:{free_port()}", decode_to_verifier, None)
    context = zmq.Context()
    inbox, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    sender.connect(f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}")
    for _ in range(2):
        ours.wake_on(inbox, None, object())
    sender.send(b"a request")
    ours.wait(600)
    assert inbox.recv(zmq.NOBLOCK) == b"a request"
    assert ours.drain() == []
    ours.wait()  # of itself, as there is none
    context.destroy(linger=0)
    ours.close()


def test_a_peer_that_sends_nonsense_is_ignored():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    ours = VerifierTransport(endpoint, decode_to_verifier, None)
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(endpoint)
    for bad in ([b""], [b"\xc1" * 9], [encode(HELLO)] * 2, [b"\x92\x01\x02"]):
        peer.send_multipart(bad)
    peer.send(encode(HELLO))
    ours.wait(30)
    ((_, message, _),) = ours.drain()
    assert message == HELLO
    assert ours.malformed == 4
    for _ in range(MOST_FAULTS):
        peer.send(b"nonsense")
    peer.send(encode(HELLO))
    other = context.socket(zmq.DEALER)
    other.connect(endpoint)
    while ours.malformed < MOST_FAULTS:
        time.sleep(0.01)
    other.send(encode(HELLO))
    ours.wait(30)
    assert len(ours.drain()) == 1, "only the other one's"
    assert ours.malformed == MOST_FAULTS
    context.destroy(linger=0)
    ours.close()


def test_a_quarantine_ends():
    quarantine = Quarantine()
    blamed = [quarantine.blame("a", 0.0) for _ in range(MOST_FAULTS)]
    assert blamed == [False] * (MOST_FAULTS - 1) + [True]
    assert quarantine.holds("a", IGNORED_S - 1)
    assert not quarantine.holds("b", 0.0)
    assert not quarantine.holds("a", IGNORED_S)
    assert not quarantine.blame("a", IGNORED_S)


def test_too_long_a_message_ends_the_connection_not_the_service():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    ours = VerifierTransport(endpoint, decode_to_verifier, None)
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(endpoint)
    peer.send(bytes((16 << 20) + 1))
    other = context.socket(zmq.DEALER)
    other.connect(endpoint)
    other.send(encode(HELLO))
    ours.wait(30)
    assert [message for _, message, _ in ours.drain()] == [HELLO]
    context.destroy(linger=0)
    ours.close()


def test_an_address_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="--vericache-peer-bind tcp://127"):
            VerifierTransport(endpoint, decode_to_verifier, None)
    with pytest.raises(ConfigError, match="--vericache-verifiers nowhere"):
        DrafterTransport(["nowhere"], decode_to_drafter, None)


def test_keys_follow_from_the_file_and_differ_by_role(tmp_path):
    one, other = (key_file(tmp_path / name) for name in "ab")
    keys, same, others = PeerKeys.read(one), PeerKeys.read(one), PeerKeys.read(other)
    assert keys == same
    made = {keys.drafter_secret, keys.verifier_secret, others.drafter_secret}
    assert len(made) == 3
    assert str(keys.drafter_secret) not in repr(keys)
    Path(one).chmod(0o644)
    with pytest.raises(ConfigError, match=r"--vericache-peer-key .*chmod 600"):
        PeerKeys.read(one)
    assert PeerKeys.read("off") is None


def test_a_decoder_raises_nothing_but_message_errors():
    dice = Random(5)
    whole = [encode(HELLO), encode(Welcome()), b"\x94\x0f"]
    for _ in range(3000):
        data = bytearray(dice.choice(whole))
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        for decode in (decode_to_verifier, decode_to_drafter):
            with suppress(MessageError):
                decode(bytes(data[: dice.randrange(len(data) + 1)]))
