"""Collective calls that carry gradients between devices, and weights where processes share swap-ins.

`Exchange.reduce` gives each process its own pieces of the mean gradients of all processes:

    rank 0   a0 a1 a2          rank 0   a0 + b0 + c0
    rank 1   b0 b1 b2   ->     rank 1   a1 + b1 + c1        piece r of every tensor, added in the order of the ranks
    rank 2   c0 c1 c2          rank 2   a2 + b2 + c2

The piece of the mean overwrites that piece of the process's own gradient, on the device's PEER stream, after everything
that was queued on the COMPUTE stream before. With several servers, the processes that have the same piece then add up their
sums, in the order of the servers.

An all-to-all moves the bytes of a reduce-scatter, but leaves the order of additions to us: the sum does not depend on the
library, the machine, or the number of tensors that are sent together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from harmony_ds.decomposer.graph import piece_of
from harmony_ds.device.base import Device, Stream

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
_BUCKET_BYTES = 64 * 2**20
"""Most bytes of gradients in one all-to-all."""
_BUFFERS = 3
"""Buffers of a bucket's bytes in a reduction: elements to send, received elements, and their sums."""


def bucket_bytes(budget_bytes: int | None) -> int:
    """Return the most bytes that a device of that budget sends at a time."""
    return _BUCKET_BYTES if budget_bytes is None else max(4096, min(_BUCKET_BYTES, budget_bytes // 64))


def buffer_bytes(budget_bytes: int | None, servers: int = 1) -> int:
    """Return the most device bytes of a reduction's buffers.

    Between servers, each one's sum is received in a buffer of its own, as large as a bucket where a server has one device.
    """
    return max(_BUFFERS, 0 if servers == 1 else servers + 2) * bucket_bytes(budget_bytes)


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups that a process is in.

    Attributes:
        server: the processes of this server.
        column: the processes, one of each server, that have the same piece as this one; None: there is one server.
        everyone: all processes.
        first: the first process of every server; None: this is none of them, or there is one server.
        servers: the number of servers.
    """

    server: dist.ProcessGroup
    column: dist.ProcessGroup | None
    everyone: dist.ProcessGroup
    first: dist.ProcessGroup | None = None
    servers: int = 1


@dataclass(frozen=True, slots=True)
class _PiecePart:
    """Part of a tensor that is sent in one bucket: of every process's piece, part `index` of `count` equal ones."""

    name: str
    numel: int
    index: int
    count: int

    def elements_of(self, rank: int, size: int) -> slice:
        """Return the elements, of the flat tensor, that go to process `rank` of `size`."""
        piece = piece_of(self.numel, rank, size)
        length = piece.stop - piece.start
        first, last = (piece.start + length * index // self.count for index in (self.index, self.index + 1))
        return slice(first, last)


class Exchange:
    """Exchange of a process with the others; every method is called by all processes, in the same order."""

    def __init__(self, groups: ProcessGroups, rank: int, size: int, in_order: bool) -> None:
        """Create the exchange of one process.

        Args:
            rank, size: of this process on its server, and the number of processes there.
            in_order: gradients are added in the order of the ranks; else in the order that the library likes.
        """
        self.groups = groups
        self._in_order = in_order
        self._rank, self._size = rank, size
        self.sent_bytes = 0  # to other processes so far

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """All groups, each once."""
        groups = (self.groups.server, self.groups.column, self.groups.everyone, self.groups.first)
        return list(dict.fromkeys(group for group in groups if group is not None))

    def reduce(
        self, device: Device, shapes: Mapping[str, int], gradients: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return this process's pieces of the mean gradients, as views of `gradients` where it has one.

        Args:
            shapes: numbers of elements of all gradients, by name and in the same order in all processes.
            gradients: of this process; missing ones count as zeros.
            dtype: of all gradients.
        """
        limit = max(1, bucket_bytes(device.budget_bytes) // dtype.itemsize)
        taken = buffer_bytes(device.budget_bytes, self.groups.servers)
        device.wait(Stream.PEER, device.record(Stream.COMPUTE))
        device.charge(taken, "the gradients that processes exchange")
        try:
            with torch.no_grad(), device.on(Stream.PEER):
                flat = {name: gradient.reshape(-1) for name, gradient in gradients.items()}
                own = {name: piece_of(numel, self._rank, self._size) for name, numel in shapes.items()}
                pieces = {}
                for name, elements in own.items():
                    if name in flat:
                        pieces[name] = flat[name][elements]
                    else:
                        pieces[name] = torch.empty(_length(elements), dtype=dtype, device=device.torch_device)
                for bucket in _buckets(shapes, limit):
                    means = self._reduce_bucket(device, bucket, flat, dtype)
                    for part, mean in zip(bucket, means, strict=True):
                        begin = part.elements_of(self._rank, self._size).start - own[part.name].start
                        pieces[part.name][begin : begin + len(mean)].copy_(mean)
        finally:
            device.discharge(taken)
        return pieces

    def _reduce_bucket(
        self, device: Device, bucket: Sequence[_PiecePart], flat: Mapping[str, Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """Return this process's piece of the mean of each part in a bucket."""
        rank, size = self._rank, self._size
        lengths = [_length(part.elements_of(rank, size)) for part in bucket]
        to_each = [sum(_length(part.elements_of(other, size)) for part in bucket) for other in range(size)]
        sent = torch.zeros(sum(to_each), dtype=dtype, device=device.torch_device)
        offset = 0
        for other in range(size):
            for part in bucket:
                elements = part.elements_of(other, size)
                if part.name in flat:
                    sent[offset : offset + _length(elements)].copy_(flat[part.name][elements])
                offset += _length(elements)
        self.sent_bytes += (len(sent) - to_each[rank]) * dtype.itemsize
        total = self._sum_in_order(sent, to_each) if self._in_order else self._reduce_scatter(sent, to_each)
        del sent
        if self.groups.column is not None:
            total = self._sum_servers(total)
        return list(total.div_(size * self.groups.servers).split(lengths))

    def _sum_servers(self, total: Tensor) -> Tensor:
        """Return the sum of all servers' sums of one piece, added in the order of the servers."""
        servers = self.groups.servers
        totals = total.new_empty(servers * len(total))
        _all_gather(totals, total, group=self.groups.column)
        self.sent_bytes += (servers - 1) * total.nbytes
        return _added_up(totals.view(servers, -1))

    def _sum_in_order(self, sent: Tensor, to_each: list[int]) -> Tensor:
        """Return the sum of what all processes of this server send to this one, added in the order of the ranks."""
        mine = to_each[self._rank]
        received = sent.new_empty(self._size * mine)
        dist.all_to_all_single(received, sent, [mine] * self._size, to_each, group=self.groups.server)
        return _added_up(received.view(self._size, mine))

    def _reduce_scatter(self, sent: Tensor, to_each: list[int]) -> Tensor:
        """Return the same sum, added in the library's order."""
        total = sent.new_empty(to_each[self._rank])
        dist.reduce_scatter(total, list(sent.split(to_each)), group=self.groups.server)
        return total

    def gather(self, device: Device, whole: Tensor) -> None:
        """Fill `whole` with the equally long parts of all processes of this server, by rank; it has this one's already."""
        own = whole.view(self._size, -1)[self._rank]
        with torch.no_grad(), device.on(Stream.PEER):
            _all_gather(whole, own, group=self.groups.server)
        self.sent_bytes += (self._size - 1) * own.nbytes

    def broadcast_to_servers(self, tensors: Sequence[Tensor]) -> None:
        """Copy host `tensors` from the first server to all others; called by every process."""
        if self.groups.first is not None:
            with torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor, group=self.groups.first, group_src=0)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a small tensor over the processes, added in the order of the ranks."""
        values = [torch.empty_like(value) for _ in range(self._size * self.groups.servers)]
        dist.all_gather(values, value.contiguous(), group=self.groups.everyone)
        return _added_up(values) / len(values)


def _added_up(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Add all `parts` to the first one, in their order, and return it."""
    total = parts[0]
    for other in parts[1:]:
        total.add_(other)
    return total


def _length(elements: slice) -> int:
    return int(elements.stop - elements.start)


def _buckets(shapes: Mapping[str, int], limit: int) -> Iterator[list[_PiecePart]]:
    """Yield buckets of at most `limit` elements: whole tensors, and parts of larger ones."""
    bucket: list[_PiecePart] = []
    filled = 0
    for name, numel in shapes.items():
        count = max(1, -(-numel // limit))
        for index in range(count):
            length = -(-numel // count)
            if bucket and filled + length > limit:
                yield bucket
                bucket, filled = [], 0
            bucket.append(_PiecePart(name, numel, index, count))
            filled += length
    if bucket:
        yield bucket
