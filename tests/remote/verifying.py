"""A verifier's process without SGLang: answers with ``histories.truth``.

python verifying.py ENDPOINT KEY_FILE_OR_off
"""

import sys

from histories import HELLO, LEASE_S, truth

from vericache_sglang.observability.counters import Counters
from vericache_sglang.remote.guests import Guests
from vericache_sglang.remote.messages import decode_to_verifier, unpack
from vericache_sglang.remote.peer_keys import PeerKeys
from vericache_sglang.remote.transport import VerifierTransport


def main(endpoint, key):
    transport = VerifierTransport(endpoint, decode_to_verifier, PeerKeys.read(key))
    running = {}

    def start(_, message):
        running[message.rid] = list(unpack(message.committed))
        return "", running[message.rid]

    guests = Guests(
        *(HELLO, 64, LEASE_S, Counters()),
        start=start,
        stop=lambda guest: running.pop(guest.rid),
    )
    print("ready", flush=True)
    while True:
        transport.wait(0.005)
        for connection, message, at in transport.drain():
            guests.receive(connection, message, at)
        for guest in guests.running():
            tokens = running[guest.rid]
            tokens.append(truth(guest.rid, len(tokens)))
            guests.advance(guest, tokens, finished=False)
        guests.tick(transport.now())
        for connection, message in guests.outbox:
            transport.send(connection, message)
        guests.outbox.clear()
        transport.repeat(guests.beats())


main(*sys.argv[1:])
