"""No fault: writes down when decodes are launched and when the host hears of them."""

import os

from vericache_sglang.engine.decoding import Decoding
from vericache_sglang.engine.flights import Flight, Flights

LOG = "VERICACHE_TEST_LOG"


def install():
    """Log one line per event to the file the environment names."""
    log = open(os.environ[LOG], "a", buffering=1)  # noqa: SIM115, lives on
    numbers = {}
    run, launch = Decoding.run, Flights.launch
    make_moves, outcome = Decoding._make_moves, Flight.outcome

    def logged_run(self, batch):
        log.write("begin\n")
        result = run(self, batch)
        log.write("end\n")
        return result

    def logged_launch(self, flight):
        if flight.decode and flight.passengers:  # the others say nothing new
            numbers[id(flight)] = len(numbers), flight
            log.write(f"launch {len(numbers) - 1}\n")
        launch(self, flight)

    def logged_moves(self, plan, batch):
        if plan.moves:
            log.write("moves\n")
        return make_moves(self, plan, batch)

    def logged_outcome(self):
        if id(self) in numbers:
            log.write(f"hear {numbers[id(self)][0]}\n")
        return outcome(self)

    Decoding.run, Flights.launch = logged_run, logged_launch
    Decoding._make_moves, Flight.outcome = logged_moves, logged_outcome
