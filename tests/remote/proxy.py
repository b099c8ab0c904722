"""A proxy between drafters and a verifier that drops, repeats and reorders messages."""

from random import Random
from threading import Thread

import zmq


class Proxy:
    """Passes whole messages on; unencrypted ones, as it is no party to the key.

    Args:
        verifier: Address of the verifier.
        share: Of messages that are lost; and repeated; and delayed.
    """

    def __init__(self, verifier, share, seed=0):
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._verifier, self.share = verifier, share
        self._dice = Random(seed)
        self._backs, self._late = {}, []
        self.passed = self.altered = 0
        self._closing = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._closing:
            poller = zmq.Poller()
            for each in (self._front, *self._backs.values()):
                poller.register(each, zmq.POLLIN)
            for found, _ in poller.poll(20):
                if found is self._front:
                    drafter, data = found.recv_multipart()
                    self._pass(self._back(drafter), [data])
                else:
                    names = {back: name for name, back in self._backs.items()}
                    self._pass(self._front, [names[found], found.recv()])
            late, self._late = self._late, []
            for socket, frames in late:
                socket.send_multipart(frames)
        for each in (self._front, *self._backs.values()):
            each.close()

    def _back(self, drafter):
        """One connection for each drafter's, so that the verifier tells them apart."""
        if drafter not in self._backs:
            made = self._context.socket(zmq.DEALER)
            made.linger = 0
            made.connect(self._verifier)
            self._backs[drafter] = made
        return self._backs[drafter]

    def _pass(self, socket, frames):
        self.passed += 1
        chance = self._dice.random()
        self.altered += chance < 3 * self.share
        if chance < self.share:
            return
        if chance < 2 * self.share:
            socket.send_multipart(frames)
        if chance < 3 * self.share and chance >= 2 * self.share:
            self._late.append((socket, frames))  # behind what comes next
            return
        socket.send_multipart(frames)

    def close(self):
        self._closing = True
        self._thread.join()
        self._context.term()
