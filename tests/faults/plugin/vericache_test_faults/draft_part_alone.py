"""Only drafts are emitted: what serving the compressed KV alone would answer.

A verification still writes exact KV for its drafts, so decoded text is a little less
lossy than under a compressor that compresses it too.
"""

from vericache_kernels.board_commit import EMIT, board_commit
from vericache_sglang.engine import token_board

NOTHING = -1
"""A draft that agrees with nothing, so that the run ends with the one before."""


def lossy(board, rows, target):
    """Emit the drafts of every row that has some."""
    ends = zip(rows.first[:-1].tolist(), rows.first[1:].tolist(), strict=True)
    for seat, kind, (start, stop) in zip(
        rows.seat.tolist(), rows.kind.tolist(), ends, strict=True
    ):
        drafts = stop - start - 1
        if kind == EMIT and drafts:
            target[start : stop - 1] = board.tokens[seat, 1 : 1 + drafts]
            board.tokens[seat, drafts] = NOTHING
    return board_commit(board, rows, target)


def install():
    """Emit the drafts; the target's token only where there is none."""
    token_board.board_commit = lossy
