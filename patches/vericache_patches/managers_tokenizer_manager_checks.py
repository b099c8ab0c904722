"""Hook on ``sglang/srt/managers/tokenizer_manager.py``: one request, checked."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def validate_one_request(manager: Any, obj: Any, input_ids: Any) -> None:
    """Validate one request; a ``ValueError`` becomes HTTP 400.

    ``TokenizerManager.vericache_check`` is set if VeriCache is on.
    """
    check = getattr(type(manager), "vericache_check", None)
    if check is not None and hasattr(obj, "logprob_start_len"):  # no embedding
        labels = None
        if manager.enable_metrics:
            labels = manager.server_args.tokenizer_metrics_allowed_custom_labels or ()
        check(obj, input_ids, manager.model_config.vocab_size, labels)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.tokenizer_manager."
                "TokenizerManager._validate_one_request"
            ),
            kind="before",
            args=("self", "obj", "input_ids"),
            reason="Request fields are checked in the HTTP process, where no spec "
            "algorithm is asked; the scheduler does not survive all of them. With "
            "--tokenizer-worker-num a subclass of the manager would miss processes.",
            remove_when="SGLang lets a plugin check a request.",
        ),
        validate_one_request,
    ),
)
