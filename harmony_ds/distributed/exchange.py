"""Exchange of gradients between processes, and of weights where they share swap-ins.

Each process gets its own pieces of the mean gradients of all.

    rank 0   a0 a1 a2          rank 0   a0 + b0 + c0
    rank 1   b0 b1 b2   ->     rank 1   a1 + b1 + c1        piece r of every tensor, added in the order of the ranks
    rank 2   c0 c1 c2          rank 2   a2 + b2 + c2

Each process's piece of the mean overwrites that piece of its own gradient, on the device's PEER stream, after all that was
computed so far. With several servers, processes that have the same piece then add up their sums, in the order of the
servers.

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
_BUFFERS = 3
"""Of sent and of received elements, and of their sums."""


def bucket_bytes(budget_bytes: int | None) -> int:
    """Return the most bytes that a device of that budget sends at a time."""
    return _BUCKET_BYTES if budget_bytes is None else max(4096, min(_BUCKET_BYTES, budget_bytes // 64))


def buffer_bytes(budget_bytes: int | None, servers: int = 1) -> int:
    """Return the most device bytes of an exchange; on servers with one device, all servers' sums are whole buckets."""
    return max(_BUFFERS, 0 if servers == 1 else servers + 2) * bucket_bytes(budget_bytes)


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Process groups of the devices, and of the servers.

    Attributes:
        server: the processes of this server.
        column: the processes of all servers that have the same piece; None: there is one server.
        everyone: all processes.
        first: the first process of every server, if this is one of them, and there are several.
    """

    server: dist.ProcessGroup
    column: dist.ProcessGroup | None
    everyone: dist.ProcessGroup
    first: dist.ProcessGroup | None = None
    servers: int = 1


@dataclass(frozen=True, slots=True)
class _Part:
    """Part `index` of `count` of every process's piece of one tensor."""

    name: str
    numel: int
    index: int
    count: int

    def of(self, rank: int, size: int) -> slice:
        piece = piece_of(self.numel, rank, size)
        length = piece.stop - piece.start
        first, last = (piece.start + length * index // self.count for index in (self.index, self.index + 1))
        return slice(first, last)


class Exchange:
    """Reduces and scatters among the processes of a group."""

    def __init__(self, groups: ProcessGroups, rank: int, size: int, in_order: bool = True) -> None:
        """`rank`, `size`: on this server. `in_order`: gradients are added up by rank; else in the library's order."""
        self.groups = groups
        self._in_order = in_order
        self._rank, self._size = rank, size
        self.sent_bytes = 0  # to other processes so far

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        groups = (self.groups.server, self.groups.column, self.groups.everyone, self.groups.first)
        return list(dict.fromkeys(group for group in groups if group is not None))

    def reduce(
        self, device: Device, shapes: Mapping[str, int], gradients: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return this process's pieces of the means.

        Args:
            shapes: numbers of elements of all gradients, by name and in the same order in all processes.
            gradients: this process's; missing ones count as zeros.
        """
        limit = max(1, bucket_bytes(device.budget_bytes) // dtype.itemsize)
        taken = buffer_bytes(device.budget_bytes, self.groups.servers)
        device.wait(Stream.PEER, device.record(Stream.COMPUTE))
        device.charge(taken, "the gradients that processes exchange")
        try:
            with torch.no_grad(), device.on(Stream.PEER):
                flat = {name: gradient.reshape(-1) for name, gradient in gradients.items()}
                mine = {name: piece_of(numel, self._rank, self._size) for name, numel in shapes.items()}
                pieces = {
                    name: flat[name][own]
                    if name in flat
                    else torch.empty(_length(own), dtype=dtype, device=device.torch_device)
                    for name, own in mine.items()
                }
                for bucket in _buckets(shapes, limit):
                    totals = self._exchange(device, bucket, flat, dtype)
                    for part, total in zip(bucket, totals, strict=True):
                        own = part.of(self._rank, self._size)
                        begin = own.start - mine[part.name].start
                        pieces[part.name][begin : begin + _length(own)].copy_(total)
        finally:
            device.discharge(taken)
        return pieces

    def _exchange(
        self, device: Device, bucket: Sequence[_Part], flat: Mapping[str, Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        rank, size = self._rank, self._size
        lengths = [_length(part.of(rank, size)) for part in bucket]
        to_each = [sum(_length(part.of(other, size)) for part in bucket) for other in range(size)]
        sent = torch.zeros(sum(to_each), dtype=dtype, device=device.torch_device)
        offset = 0
        for other in range(size):
            for part in bucket:
                elements = part.of(other, size)
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
        """Return the sum of all servers' sums, in their order."""
        servers = self.groups.servers
        totals = total.new_empty(servers * len(total))
        _all_gather(totals, total, group=self.groups.column)
        self.sent_bytes += (servers - 1) * total.nbytes
        return _added_up(totals.view(servers, -1))

    def _sum_in_order(self, sent: Tensor, to_each: list[int]) -> Tensor:
        mine = to_each[self._rank]
        received = sent.new_empty(self._size * mine)
        dist.all_to_all_single(received, sent, [mine] * self._size, to_each, group=self.groups.server)
        return _added_up(received.view(self._size, mine))

    def _reduce_scatter(self, sent: Tensor, to_each: list[int]) -> Tensor:
        total = sent.new_empty(to_each[self._rank])
        dist.reduce_scatter(total, list(sent.split(to_each)), group=self.groups.server)
        return total

    def gather(self, device: Device, whole: Tensor) -> None:
        """Fill `whole` with the equally long parts of all processes, by rank."""
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


def _buckets(shapes: Mapping[str, int], limit: int) -> Iterator[list[_Part]]:
    """Yield buckets of at most `limit` elements: whole tensors, and parts of larger ones."""
    bucket: list[_Part] = []
    filled = 0
    for name, numel in shapes.items():
        count = max(1, -(-numel // limit))
        for index in range(count):
            length = -(-numel // count)
            if bucket and filled + length > limit:
                yield bucket
                bucket, filled = [], 0
            bucket.append(_Part(name, numel, index, count))
            filled += length
    if bucket:
        yield bucket
