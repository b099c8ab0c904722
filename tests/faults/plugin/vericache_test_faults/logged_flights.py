"""No fault: writes down when decodes are launched and when they are recorded."""

import os

from vericache_sglang.runtime.in_flight import InFlightQueue
from vericache_sglang.runtime.iteration import Decoding

LOG = "VERICACHE_TEST_LOG"


def install():
    """Log one line per event to the file the environment names."""
    log = open(os.environ[LOG], "a", buffering=1)  # noqa: SIM115, lives on
    numbers = {}
    run, launch = Decoding.run, InFlightQueue.launch
    make_moves, record = Decoding._make_moves, InFlightQueue._record_results

    def logged_run(self, batch):
        log.write("begin\n")
        result = run(self, batch)
        log.write("end\n")
        return result

    def logged_launch(self, entry):
        if entry.decode and entry.pending_rows:  # the others say nothing new
            numbers[id(entry)] = len(numbers), entry
            log.write(f"launch {len(numbers) - 1}\n")
        launch(self, entry)

    def logged_moves(self, plan, batch):
        if plan.moves:
            log.write("moves\n")
        return make_moves(self, plan, batch)

    def logged_record(self, ended, outcome):
        if id(ended) in numbers:
            log.write(f"record {numbers[id(ended)][0]}\n")
        record(self, ended, outcome)

    Decoding.run, InFlightQueue.launch = logged_run, logged_launch
    Decoding._make_moves, InFlightQueue._record_results = logged_moves, logged_record
