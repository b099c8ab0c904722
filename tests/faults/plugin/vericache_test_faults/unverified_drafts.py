"""Every draft is accepted, whatever the full KV says: a lossy server."""

from vericache_kernels.board_commit import EMIT, board_commit
from vericache_sglang.engine import token_board


def trusting(board, rows, target):
    """Put the drafts where the full KV's tokens stand, but for each row's last."""
    ends = zip(rows.first[:-1].tolist(), rows.first[1:].tolist(), strict=True)
    for seat, kind, (start, stop) in zip(
        rows.seat.tolist(), rows.kind.tolist(), ends, strict=True
    ):
        if kind == EMIT:
            target[start : stop - 1] = board.tokens[seat, 1 : stop - start]
    return board_commit(board, rows, target)


def install():
    """Emit the drafts and the target's last token."""
    token_board.board_commit = trusting
