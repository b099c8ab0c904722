"""The gate waits where SGLang's pool asks it to; early starts pay, or are not made."""

import threading
import time

import pytest
import torch
from arriving import until
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.engine.layer_gate import (
    ForwardPace,
    LayerGate,
    stands_still_s,
    worth_starting,
)
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.sglang_pools import staged_pool_class

LAYERS = 3


class Copy:
    """A copy to the device, of which a test says what is here."""

    def __init__(self, fails=None):
        self.here, self.asked, self.fails = threading.Semaphore(0), [], fails

    def await_layer(self, layer):
        self.asked.append(layer)
        if layer == self.fails:
            raise TransferError(f"checksum differs in layer {layer}")
        self.here.acquire()


@pytest.fixture
def pool():
    return staged_pool_class(8)(
        16,
        page_size=1,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


# -- in front of the layers ---------------------------------------------------------


@pytest.mark.sglang
def test_a_layers_buffers_are_handed_out_when_the_layer_is_here(pool):
    copy = Copy()
    gate = LayerGate({"k": copy}, LAYERS, ForwardPace())
    handed = []

    def forward():
        with gate.over(pool):
            for layer in range(LAYERS):
                pool.get_kv_buffer(layer)
                handed.append(layer)

    thread = threading.Thread(target=forward)
    thread.start()
    for layer in range(LAYERS):
        until(lambda layer=layer: copy.asked == list(range(layer + 1)))
        assert handed == list(range(layer))
        copy.here.release()
    thread.join(20)
    assert handed == [0, 1, 2]
    assert gate.stood_still_s > 0
    gate.close()
    assert pool.layer_transfer_counter is None
    pool.get_kv_buffer(0)
    assert copy.asked == [0, 1, 2], "each layer once, and nothing afterwards"


@pytest.mark.sglang
def test_who_waited_at_the_pool_before_does_so_afterwards(pool):
    before = LayerGate({}, LAYERS, ForwardPace())
    pool.register_layer_transfer_counter(before)
    gate = LayerGate({}, LAYERS, ForwardPace())

    def forward():
        with gate.over(pool):
            assert pool.layer_transfer_counter is gate
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forward()
    assert pool.layer_transfer_counter is before


def test_a_failed_copy_is_noted_and_waited_for_no_longer():
    bad, good = Copy(fails=1), Copy()
    good.here.release(LAYERS)
    bad.here.release(LAYERS)
    gate = LayerGate({"bad": bad, "good": good}, LAYERS, ForwardPace())
    for layer in range(LAYERS):
        gate.wait(layer)
    assert (gate.keys, gate.failed) == (("bad", "good"), {"bad"})
    assert (bad.asked, good.asked) == ([0, 1], [0, 1, 2])
    gate.close()


def test_without_copies_nothing_is_waited_for_or_missed():
    gate = LayerGate({}, LAYERS, ForwardPace())
    gate.close()
    gate.wait(0)
    gate.close()
    assert (gate.stood_still_s, gate.failed) == (0.0, set())


@pytest.mark.parametrize("asked", [[], [0], [0, 1]])
def test_a_forward_that_did_not_ask_for_every_layer_is_refused(asked):
    copy = Copy()
    copy.here.release(LAYERS)
    gate = LayerGate({"k": copy}, LAYERS, ForwardPace())
    for layer in asked:
        gate.wait(layer)
    with pytest.raises(InvariantError, match="does not wait"):
        gate.close()


def test_a_forwards_pace_is_learned_without_the_time_it_stood_still():
    copy, pace = Copy(), ForwardPace()
    assert pace.layer_s == 0.0
    gate = LayerGate({"k": copy}, LAYERS, pace)
    for layer in range(LAYERS):
        threading.Timer(0.1, copy.here.release).start()
        gate.wait(layer)
        time.sleep(0.01)
    assert 0.01 <= pace.layer_s < 0.06
    assert gate.stood_still_s > 0.25


# -- whether to start early -----------------------------------------------------------

times = st.floats(1e-6, 1.0)


@settings(max_examples=60)
@given(
    layers=st.integers(1, 40),
    data=st.data(),
    arrival_s=times,
    forward_s=st.floats(0.0, 1.0),
)
def test_a_stall_is_what_playing_the_forward_through_gives(
    layers, data, arrival_s, forward_s
):
    arrived = data.draw(st.integers(0, layers))
    now = stood = 0.0
    for layer in range(layers):
        here = max(0, layer + 1 - arrived) * arrival_s
        stood += max(0.0, here - now)
        now = max(now, here) + forward_s
    found = stands_still_s(layers, arrived, arrival_s, forward_s)
    assert found == pytest.approx(stood, abs=1e-9)


def test_starting_early_is_worth_it_up_to_what_it_saves():
    assert worth_starting(0.02, rows=1, iteration_s=0.02, users=1)
    assert not worth_starting(0.021, rows=1, iteration_s=0.02, users=1)
    assert not worth_starting(0.011, rows=2, iteration_s=0.02, users=1)
    assert worth_starting(0.011, rows=2, iteration_s=0.02, users=2)
    assert not worth_starting(0.0, rows=1, iteration_s=0.0, users=1), "graphs"
