"""Arguments of a call, taken over."""

import torch

from harmony_ds.stepping.inputs import Arguments


def test_a_tensor_that_is_given_twice_is_one_on_the_device_and_not_the_caller_s() -> None:
    ids = torch.arange(3)
    args, kwargs = Arguments((ids,), {"labels": ids}, take_over=True).mapped(torch.clone)
    assert args[0] is kwargs["labels"] and args[0] is not ids
    assert torch.equal(args[0], ids)
