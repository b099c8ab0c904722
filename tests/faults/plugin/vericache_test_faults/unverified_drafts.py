"""Every draft is accepted, whatever the full KV says: a lossy server."""

from vericache_kernels.token_commit import EMIT, token_commit
from vericache_sglang.runtime.forward import draft_tokens as draft_tokens


def trusting(draft_tokens, rows, target):
    """Put the drafts where the full KV's tokens stand, but for each row's last."""
    ends = zip(rows.first[:-1].tolist(), rows.first[1:].tolist(), strict=True)
    for pool_idx, kind, (start, stop) in zip(
        rows.pool_idx.tolist(), rows.kind.tolist(), ends, strict=True
    ):
        if kind == EMIT:
            target[start : stop - 1] = draft_tokens.tokens[pool_idx, 1 : stop - start]
    return token_commit(draft_tokens, rows, target)


def install():
    """Emit the drafts and the target's last token."""
    draft_tokens.token_commit = trusting
