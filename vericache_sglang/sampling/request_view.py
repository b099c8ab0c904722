"""View of a request with unverified drafts, for custom logit processors."""

from __future__ import annotations

from typing import Any

REQUEST_KEY = "__req__"
"""Key of the request among a processor's parameters (``Req.__init__``)."""


class RequestView:
    """A ``Req`` whose ``output_ids`` include drafts; all else is the request's.

    Args:
        req: SGLang's ``Req``.
        output_ids: Output tokens before the position that is being sampled.
    """

    def __init__(self, req: Any, output_ids: list[int]) -> None:
        self._req = req
        self.output_ids = output_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def processor_params(req: Any, output_ids: list[int]) -> dict[str, Any] | None:
    """Return a request's ``custom_params`` for one position of its text."""
    params: dict[str, Any] | None = req.sampling_params.custom_params
    if params is None or REQUEST_KEY not in params:
        return params
    return {**params, REQUEST_KEY: RequestView(req, output_ids)}
