"""Bytes of extents in a test: what is written, and what is found."""

import random

import torch

from vericache_sglang.memory.arena import Arena

BYTES = torch.uint8


def new_arena(nbytes):
    return Arena(nbytes, pinned=False)


def content(number, nbytes):
    """Bytes that no other number has in this order."""
    return random.Random(number).randbytes(nbytes)


def write(extent, number):
    raw = bytearray(content(number, extent.nbytes))
    if raw:
        extent.view(BYTES, (extent.nbytes,)).copy_(torch.frombuffer(raw, dtype=BYTES))


def read(extent):
    """The bytes an extent names, through the arena's own buffer."""
    end = extent.start + extent.nbytes
    return extent._buffer[extent.start : end].numpy().tobytes()


def grains(nbytes):
    """Bytes taken for a request, counted up one grain at a time."""
    taken = 64
    while taken < nbytes:
        taken += 64
    return taken
