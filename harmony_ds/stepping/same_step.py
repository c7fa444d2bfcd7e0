"""Whether all processes take the same step."""

from __future__ import annotations

import hashlib

from torch import Tensor

from harmony_ds.errors import UsageError
from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.parallel import SingleProcess

_DIGEST_BYTES = hashlib.sha256().digest_size
_SHOWN_BYTES = 2048


def check_same_step(world: SingleProcess, micro_batches: int, hyper: Hyper) -> None:
    """Raise UsageError if another process takes a step of other micro-batches or hyper-parameters.

    A digest is compared, since an agreement holds few bytes; the text is for the error alone, and may be cut.
    """
    # A tensor's own text leaves digits and elements out.
    exact = [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()} for group in hyper]
    text = repr(exact).encode()
    shown = text if len(text) <= _SHOWN_BYTES else text[:_SHOWN_BYTES] + b"..."
    told = world.agree(f"take a step of {micro_batches} micro-batches", hashlib.sha256(text).digest() + shown)
    first, *others = (said[_DIGEST_BYTES:].decode(errors="replace") for said in told)
    for rank, other in enumerate(others, start=1):
        if told[rank][:_DIGEST_BYTES] != told[0][:_DIGEST_BYTES]:
            raise UsageError(
                f"the optimizer's hyper-parameters of rank {rank} are {other}, and those of rank 0 {first}: schedules and "
                "changes by hand must be the same everywhere."
            )
