"""Real gloo ranks for tests: forked processes that call what they are told to."""

import multiprocessing
import traceback
from datetime import timedelta

import torch
from sglang.srt.utils import kill_itself_when_parent_died
from torch import distributed

from vericache_sglang.errors import VeriCacheError

PATIENCE = timedelta(seconds=120)


class Ranks:
    """Forked processes with a gloo group; each call runs on all of them at once.

    Args:
        count: Ranks.
        folder: Where they meet.
    """

    def __init__(self, count, folder):
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, folder / "meeting", theirs)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function, *arguments):
        """Return function(group, rank, *arguments) of every rank, by rank.

        A rank that raised returns the exception instead.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(240), "a rank waits for another one"
            answers.append(pipe.recv())
        return answers

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _serve(rank, count, meeting, pipe):
    kill_itself_when_parent_died()
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=count,
        timeout=PATIENCE,
    )
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send(function(distributed.group.WORLD, rank, *arguments))
        except VeriCacheError as error:
            error.add_note(traceback.format_exc())
            pipe.send(error)
    distributed.destroy_process_group()
