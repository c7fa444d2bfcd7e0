"""What processes send each other: gradients, and where they share swap-ins, weights.

Gradients of all processes become their means, of which each process gets its own pieces.

    rank 0   a0 a1 a2          rank 0   a0 + b0 + c0
    rank 1   b0 b1 b2   ->     rank 1   a1 + b1 + c1        piece r of every tensor, added in the order of the ranks
    rank 2   c0 c1 c2          rank 2   a2 + b2 + c2

Each process's piece of the mean takes the place of that piece of its own gradient. It all happens on the device's PEER
stream, behind what was computed so far. Where there are several servers, those who have the same piece then add up what
they have, in the order of the servers.

An all-to-all moves the bytes of a reduce-scatter, and leaves the order of additions to us: the sum is the same whatever
the library, the machine, or the number of tensors that are sent together.
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
"""What is sent, what is received, and their sums, at most."""


def bucket_bytes(budget_bytes: int | None) -> int:
    """What is sent at a time, at most, by a device of that budget."""
    return _BUCKET_BYTES if budget_bytes is None else max(4096, min(_BUCKET_BYTES, budget_bytes // 64))


def buffer_bytes(budget_bytes: int | None, servers: int = 1) -> int:
    """What it takes on the device, at most: of a server with one device, its sums and those of all are whole buckets."""
    return max(_BUFFERS, 0 if servers == 1 else servers + 2) * bucket_bytes(budget_bytes)


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Process groups of the devices.

    Attributes:
        server: the processes of this server.
        column: those that have the same piece on all servers; None: there is one server.
        everyone: all.
    """

    server: dist.ProcessGroup
    column: dist.ProcessGroup | None
    everyone: dist.ProcessGroup
    servers: int = 1


@dataclass(frozen=True, slots=True)
class _Part:
    """Part `index` of `count` of every process's piece of one tensor."""

    name: str
    numel: int
    index: int
    count: int

    def of(self, rank: int, size: int) -> slice:
        """Its elements in the piece of `rank`."""
        piece = piece_of(self.numel, rank, size)
        length = piece.stop - piece.start
        return slice(
            piece.start + length * self.index // self.count, piece.start + length * (self.index + 1) // self.count
        )


class Exchange:
    """Reduces and scatters among the processes of a group."""

    def __init__(self, groups: ProcessGroups, rank: int, size: int, in_order: bool = True) -> None:
        """What one of the processes of `groups` does.

        Args:
            rank, size: of this process on its server.
            in_order: gradients are added up in the order of the ranks; else as the group's library likes.
        """
        self._group = groups.server
        self._groups = groups
        self._in_order = in_order
        self._rank, self._size = rank, size
        self.sent_bytes = 0
        """What has been sent to other processes so far."""

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """Those that are still to be ended."""
        groups = (self._groups.server, self._groups.column, self._groups.everyone)
        return list(dict.fromkeys(group for group in groups if group is not None))

    def reduce(
        self, device: Device, shapes: Mapping[str, int], gradients: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """This process's pieces of the means.

        Args:
            shapes: elements of what is reduced, by name and in the same order everywhere.
            gradients: this process's; it adds zeros for those that it has none of.
        """
        limit = max(1, bucket_bytes(device.budget_bytes) // dtype.itemsize)
        taken = buffer_bytes(device.budget_bytes, self._groups.servers)
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
        if self._groups.column is not None:
            total = self._sum_servers(total)
        return list(total.div_(size * self._groups.servers).split(lengths))

    def _sum_servers(self, total: Tensor) -> Tensor:
        """The sum of all servers' sums, in their order."""
        servers = self._groups.servers
        totals = total.new_empty(servers * len(total))
        _all_gather(totals, total, group=self._groups.column)
        self.sent_bytes += (servers - 1) * total.nbytes
        parts = totals.view(servers, -1)
        total.copy_(parts[0])
        for other in parts[1:]:
            total.add_(other)
        return total

    def _sum_in_order(self, sent: Tensor, to_each: list[int]) -> Tensor:
        mine = to_each[self._rank]
        received = sent.new_empty(self._size * mine)
        dist.all_to_all_single(received, sent, [mine] * self._size, to_each, group=self._group)
        parts = received.view(self._size, mine)
        total = parts[0].clone()
        for other in parts[1:]:
            total.add_(other)
        return total

    def _reduce_scatter(self, sent: Tensor, to_each: list[int]) -> Tensor:
        total = sent.new_empty(to_each[self._rank])
        dist.reduce_scatter(total, list(sent.split(to_each)), group=self._group)
        return total

    def gather(self, device: Device, whole: Tensor) -> None:
        """Fills `whole`, of which each process has one of equally long parts, by rank."""
        own = whole.view(self._size, -1)[self._rank]
        with torch.no_grad(), device.on(Stream.PEER):
            _all_gather(whole, own, group=self._group)
        self.sent_bytes += (self._size - 1) * own.nbytes

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a small tensor over the processes, added in the order of the ranks."""
        values = [torch.empty_like(value) for _ in range(self._size * self._groups.servers)]
        dist.all_gather(values, value.contiguous(), group=self._groups.everyone)
        total = values[0]
        for other in values[1:]:
            total = total + other
        return total / len(values)


def _length(elements: slice) -> int:
    return int(elements.stop - elements.start)


def _buckets(shapes: Mapping[str, int], limit: int) -> Iterator[list[_Part]]:
    """Tensors that go together, and parts of those that are too large."""
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
