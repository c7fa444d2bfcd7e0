"""Happens-before order: vector clocks of the streams and the host, and the memory that they use.

The algorithm is that of ThreadSanitizer and of `torch.cuda._sanitizer`: an access is in order if every other access to
the same memory (except reads among each other) is known to be done before it. That depends on the
program's events alone, not on how fast it runs, so that one run shows what any run could do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from harmony_ds.device import Stream

Who = tuple[int, Stream] | None
"""A stream of a device, by the device's number; None: the host."""
Clock = dict[Who, int]
"""By stream, the number of its accesses that are known to be done."""


@dataclass(eq=False, slots=True)
class Block:
    """A block of memory: its owner, and the last accesses to it by each stream.

    Attributes:
        used: streams recorded with the allocator, which waits for their work up to the time of the free.
        done: their clocks at that time.
    """

    owner: Who
    what: str
    reads: Clock = field(default_factory=dict)
    writes: Clock = field(default_factory=dict)
    used: set[Who] = field(default_factory=set)
    done: Clock = field(default_factory=dict)


class Order:
    """The clocks, and an allocator's pools: memory that a stream freed may be its next allocation."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        self._known: defaultdict[Who, Clock] = defaultdict(dict)
        self._freed: defaultdict[Who, deque[Block]] = defaultdict(deque)

    def snapshot(self, who: Who) -> Clock:
        """Return the accesses that are done when `who` reaches its current point."""
        return dict(self._known[who])

    def join(self, who: Who, done: Clock) -> None:
        """Order later accesses of `who` after all of `done`."""
        known = self._known[who]
        for other, at in done.items():
            known[other] = max(at, known.get(other, 0))

    def access(self, who: Who, block: Block, write: bool, what: str) -> None:
        """Note that `who` reads or writes `block`, and report unordered accesses to it."""
        if who is not None:
            self.join(who, self._known[None])  # issued by the host, after all that the host has waited for
        known = self._known[who]
        for kind, others in (("written", block.writes), ("read", block.reads if write else {})):
            for other, at in others.items():
                if other != who and known.get(other, 0) < at:
                    self.reports.append(
                        f"{what} on {name_of(who)} {'writes' if write else 'reads'} {block.what}, which {name_of(other)} "
                        f"may not have {kind} yet"
                    )
        known[who] = known.get(who, 0) + 1
        (block.writes if write else block.reads)[who] = known[who]

    def free(self, block: Block) -> None:
        """Note that the program dropped `block`; on any thread."""
        for who in block.used:
            for other, at in list(self._known[who].items()):
                block.done[other] = max(at, block.done.get(other, 0))
        self._freed[block.owner].append(block)

    def allocate(self, who: Who, what: str) -> Block:
        """Return a new block of `who`, which may reuse any that it has freed."""
        self.join(who, self._known[None])
        freed = self._freed[who]
        while freed:
            block = freed.popleft()
            for others in (block.writes, block.reads):
                for other, at in others.items():
                    if other != who and max(self._known[who].get(other, 0), block.done.get(other, 0)) < at:
                        self.reports.append(
                            f"{block.what} was given back to {name_of(who)} and may be handed out again, while "
                            f"{name_of(other)} may still use it"
                        )
        return Block(who, what)


def name_of(who: Who) -> str:
    """Return the name of a stream or the host in reports."""
    if who is None:
        return "the host"
    return who[1].name + (f" of device {who[0]}" if who[0] else "")
