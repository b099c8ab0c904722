"""Only drafts are emitted: what serving the compressed KV alone would answer.

A verification still writes exact KV for its drafts, so decoded text is a little less
lossy than under a compressor that compresses it too.
"""

from vericache_kernels.token_commit import EMIT, token_commit
from vericache_sglang.runtime.forward import draft_tokens as draft_tokens

NOTHING = -1
"""A draft that agrees with nothing, so that the run ends with the one before."""


def lossy(draft_tokens, rows, target):
    """Emit the drafts of every row that has some."""
    ends = zip(rows.first[:-1].tolist(), rows.first[1:].tolist(), strict=True)
    for pool_idx, kind, (start, stop) in zip(
        rows.pool_idx.tolist(), rows.kind.tolist(), ends, strict=True
    ):
        drafts = stop - start - 1
        if kind == EMIT and drafts:
            target[start : stop - 1] = draft_tokens.tokens[pool_idx, 1 : 1 + drafts]
            draft_tokens.tokens[pool_idx, drafts] = NOTHING
    return token_commit(draft_tokens, rows, target)


def install():
    """Emit the drafts; the target's token only where there is none."""
    draft_tokens.token_commit = lossy
