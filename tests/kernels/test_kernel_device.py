"""The switch that says where kernels run, and moving a case there."""

import pytest
import torch
from kernel_device import DEVICE, SWITCH, chosen, moved

from vericache_kernels.token_commit import DraftTokens


def test_a_device_is_used_where_there_is_one():
    assert chosen(None, True) == chosen("cuda", True) == "cuda"
    assert chosen(None, False) == "cpu"


@pytest.mark.parametrize(
    ("switch", "available"), [("cuda", False), ("interpreter", True), ("", False)]
)
def test_the_switch_never_falls_back_to_the_interpreter(switch, available):
    with pytest.raises(RuntimeError, match=f"{SWITCH} may only be cuda"):
        chosen(switch, available)


def test_a_moved_view_keeps_its_strides_and_what_lies_between():
    whole = torch.arange(24.0).view(4, 6)
    view = whole[1:, ::2]
    draft_tokens, (copy, dtype) = moved(
        (DraftTokens(whole.clone(), view, view), (view, torch.int8))
    )
    assert torch.equal(copy.cpu(), view)
    assert copy.stride() == draft_tokens.drafted.stride() == view.stride()
    assert copy._base.flatten().tolist() == whole.flatten().tolist()
    assert copy.device.type == draft_tokens.tokens.device.type == DEVICE
    assert dtype is torch.int8
    copy.zero_()
    assert view[0].tolist() == [6, 8, 10]
