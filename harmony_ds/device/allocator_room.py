"""What libraries and torch's caching allocator take of a device's memory beside a plan. Pure arithmetic: no GPU is asked.

workspaces   of cuBLAS: one for each (handle, stream), and a handle for each thread, the engine's and autograd's. 32 MiB
             from compute capability 9.0 on, else 8,320 KiB; cuBLASLt uses the same (torch,
             aten/src/ATen/cuda/CublasHandlePool.cpp, unless CUBLAS_WORKSPACE_CONFIG says otherwise)
segments     one of small blocks and one of larger ones for each stream that allocates (torch,
             c10/cuda/CUDACachingAllocator.cpp: kSmallBuffer, kLargeBuffer), which may be next to empty
fragments    free memory in pieces that serve no request. The largest requests of a step are those of one micro-batch in
             a layer or in the loss; between two of them, tensors that stay longer are put where they were
"""

from __future__ import annotations

SEGMENT_BYTES = (2 + 20) * 2**20
"""What a stream's segments take that may be next to empty."""
FIXED_PARTS = 10
"""With fixed segments, one part in so many of a budget may be in fragments: 9.4 % of 24 GiB were on an H200, which ended a
step."""
_WORKING_FRACTION, _BUDGET_FRACTION = 1 / 2, 1 / 12
"""With segments that grow, fragments as a fraction of a micro-batch's working memory, and of the budget: the less counts
(`python -m benchmarks.allocator`)."""
_STREAMS = 2
"""Streams that allocate device memory in any step: COMPUTE and UPLOAD. PEER does, too, where there are several devices."""
OTHER_POOLS_BYTES = (_STREAMS + 1) * SEGMENT_BYTES
"""What is left to all other pools where that of compute's larger blocks is filled, beside larger uploads."""
_UPLOAD_SEGMENT_BYTES = 20 * 2**20
"""The first segment of larger blocks of the pool of uploads, which is always set aside."""


def reserve_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of workspaces and segments on a device of this compute capability."""
    return 2 * (8320 * 2**10 if capability < (9, 0) else 32 * 2**20) + _STREAMS * SEGMENT_BYTES


def upload_bytes(input_bytes: int) -> int:
    """Return the bytes to set aside for uploads beside the segments of every stream.

    Args:
        input_bytes: of all micro-batches of a step. The memory of one is not used again before the device has passed its
            last use, by which time the host may have issued the whole step.
    """
    return 0 if input_bytes <= _UPLOAD_SEGMENT_BYTES else input_bytes


def fragment_bytes(budget_bytes: int, working_bytes: int) -> int:
    """Return the bytes that an allocator with expandable segments is expected to hold in fragments.

    Args:
        budget_bytes: the most that it may hold.
        working_bytes: the most that one micro-batch takes while it runs through a layer or the loss.
    """
    return int(min(_WORKING_FRACTION * working_bytes, _BUDGET_FRACTION * budget_bytes))
