"""The iteration model against machines whose coefficients are known."""

from dataclasses import astuple
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.iteration_model import (
    MOST,
    Coefficients,
    IterationModel,
    Work,
)

START = Coefficients(5e-3, 1e-5, 1e-8, 1e-9)


def random_work(rnd):
    """Return a batch of up to 32 rows, a quarter of them verified."""
    tokens = reads = products = 0
    for _ in range(rnd.randint(1, 32)):
        context = rnd.randint(500, 30_000)
        row = 1 + (rnd.randint(4, 64) if rnd.random() < 0.25 else 0)
        tokens += row
        reads += context
        products += row * context
    return Work(tokens, reads, products)


def machine(truth, work):
    return (
        truth.base_s
        + truth.per_token_s * work.tokens
        + truth.per_read_s * work.reads
        + truth.per_product_s * work.products
    )


def feed(model, truth, count, rnd, noise=0.05):
    for _ in range(count):
        work = random_work(rnd)
        model.observe(work, machine(truth, work) * max(0.3, rnd.gauss(1, noise)))


MACHINES = {
    "near-the-start": Coefficients(8e-3, 6e-5, 3e-8, 2e-9),
    "a-slow-processor": Coefficients(5e-2, 4e-3, 1e-6, 5e-7),
    "attention-is-all": Coefficients(5e-4, 1e-4, 3e-8, 3e-9),
}


@pytest.mark.parametrize("truth", MACHINES.values(), ids=MACHINES)
def test_known_coefficients_are_recovered(truth):
    model, rnd = IterationModel(START), Random(0)
    feed(model, truth, 2000, rnd)
    assert astuple(model.coefficients) == pytest.approx(astuple(truth), rel=0.2)
    for _ in range(100):
        work = random_work(rnd)
        assert model.predict(work) == pytest.approx(machine(truth, work), rel=0.05)


def test_without_noise_a_hundred_iterations_are_enough():
    model = IterationModel(START)
    feed(model, MACHINES["near-the-start"], 100, Random(0), noise=0.0)
    expected = astuple(MACHINES["near-the-start"])
    assert astuple(model.coefficients) == pytest.approx(expected, rel=0.03)


def test_a_prediction_is_the_sum_of_its_parts():
    work = Work(tokens=3, reads=1000, products=2000)
    model = IterationModel(START)
    assert model.marginal(work) == pytest.approx(3e-5 + 1e-5 + 2e-6)
    assert model.predict(work) == pytest.approx(5e-3 + 4.2e-5)
    assert model.iteration_s.value == START.base_s


def test_work_that_never_varies_keeps_the_split_of_the_start():
    # The start says 15 ms: two thirds base, one third reads; the machine takes 30 ms.
    start = Coefficients(1e-2, 1e-7, 1e-7, 1e-12)
    model, work, rnd = IterationModel(start), Work(8, 50_000, 50_000), Random(0)
    for _ in range(3000):
        model.observe(work, 0.03 * rnd.gauss(1, 0.05))
    assert model.predict(work) == pytest.approx(0.03, rel=0.05)
    base, reads = model.coefficients.base_s, model.coefficients.per_read_s * 50_000
    assert reads == pytest.approx(base / 2, rel=0.02)


def test_what_was_learned_survives_work_that_stops_varying():
    truth, rnd = MACHINES["near-the-start"], Random(0)
    model = IterationModel(START)
    feed(model, truth, 1000, rnd)
    same = Work(8, 80_000, 80_000)
    for _ in range(3000):
        model.observe(same, machine(truth, same) * rnd.gauss(1, 0.05))
    other = Work(40, 400_000, 4_000_000)
    assert model.predict(other) == pytest.approx(machine(truth, other), rel=0.2)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_machine_that_changes_its_speed_is_followed(factor):
    truth, rnd = MACHINES["near-the-start"], Random(0)
    model = IterationModel(START)
    feed(model, truth, 1000, rnd)
    changed = Coefficients(*(factor * value for value in astuple(truth)))
    feed(model, changed, 200, rnd)
    for _ in range(100):
        work = random_work(rnd)
        assert model.predict(work) == pytest.approx(machine(changed, work), rel=0.15)
    typical = sum(machine(changed, random_work(rnd)) for _ in range(500)) / 500
    assert model.iteration_s.value == pytest.approx(typical, rel=0.3)


def test_outliers_hardly_move_the_prediction():
    truth, rnd = MACHINES["near-the-start"], Random(0)
    model = IterationModel(START)
    feed(model, truth, 500, rnd)
    work = random_work(rnd)
    for outlier in (100.0, 1e-9, 30.0):
        model.observe(work, outlier)
        assert model.predict(work) == pytest.approx(machine(truth, work), rel=0.05)
        assert model.iteration_s.value < 0.1


@pytest.mark.parametrize("before", [0, 8, 500])
def test_kernels_that_are_compiled_say_nothing_of_a_machine(before):
    """Seen on an H200: the first mixed iterations took up to a second each."""
    truth, rnd = MACHINES["near-the-start"], Random(0)
    model = IterationModel(truth)
    feed(model, truth, before, rnd)
    known = model.coefficients
    for stall in (0.6, 0.4, 0.1):
        work = random_work(rnd)
        model.observe(work, stall + 4 * model.predict(work))
    assert model.coefficients == known


def test_a_machine_that_has_become_a_hundred_times_slower_is_believed():
    truth, rnd = MACHINES["near-the-start"], Random(0)
    model = IterationModel(START)
    feed(model, truth, 500, rnd)
    slow = Coefficients(*(100 * value for value in astuple(truth)))
    feed(model, slow, 300, rnd)
    work = random_work(rnd)
    assert model.predict(work) == pytest.approx(machine(slow, work), rel=0.3)


def test_what_cannot_be_negative_is_made_up_for_by_the_others():
    # Tokens seem to save time here: cutting their part off would predict far too much.
    truth, rnd = Coefficients(3e-2, -2e-5, 3e-8, 2e-9), Random(0)
    model = IterationModel(START)
    feed(model, truth, 1000, rnd)
    assert model.coefficients.per_token_s == 0.0
    works = [random_work(rnd) for _ in range(500)]
    ratios = [model.predict(work) / machine(truth, work) for work in works]
    assert sum(ratios) / 500 == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_is_ignored(seconds):
    model = IterationModel(START)
    model.observe(Work(1, 10, 10), seconds)
    assert model.coefficients == START
    assert model.iteration_s.value == START.base_s


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (Coefficients(5e-3, 0.0, 1e-8, 1e-9), {}),
        (Coefficients(5e-3, 2.0, 1e-8, 1e-9), {}),
        (Coefficients(float("nan"), 1e-5, 1e-8, 1e-9), {}),
        (START, {"confidence": 0.0}),
        (START, {"memory": 1.0}),
    ],
)
def test_an_impossible_start_is_refused(start, more):
    with pytest.raises(InvariantError):
        IterationModel(start, **more)


COUNTS = st.integers(0, 10**7)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.builds(Work, COUNTS, COUNTS, st.integers(0, 10**10)),
            st.floats(1e-9, 1e6),
        ),
        max_size=60,
    )
)
def test_whatever_is_observed_the_coefficients_stay_inside_the_bounds(history):
    model = IterationModel(START)
    for work, seconds in history:
        model.observe(work, seconds)
        found = zip(astuple(model.coefficients), astuple(MOST), strict=True)
        assert all(0.0 <= value <= most for value, most in found)
        assert 0.0 < model.predict(work) < float("inf")
