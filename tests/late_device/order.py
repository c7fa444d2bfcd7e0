"""Who is known to be behind whom: vector clocks of the streams and the host, and the memory that they use.

The algorithm is that of ThreadSanitizer and of `torch.cuda._sanitizer`: an access is in order if every other access to
the same memory (but reads among each other) is known to be done when its own stream comes to it. Whether it is says the
program's events alone, not how fast anything ran, so one run shows what any run could do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from harmony_ds.device import Stream

Who = tuple[int, Stream] | None
"""A stream of a device, by the device's number; None: the host."""
Clock = dict[Who, int]
"""Up to which of each one's accesses are known to be done."""


@dataclass(eq=False, slots=True)
class Block:
    """Memory in one piece: whose it is, and the last accesses to it by each stream.

    Attributes:
        used: streams that the allocator was told of: it waits until they have come to where the memory was given back.
        done: what they had done there.
    """

    owner: Who
    what: str
    reads: Clock = field(default_factory=dict)
    writes: Clock = field(default_factory=dict)
    used: set[Who] = field(default_factory=set)
    done: Clock = field(default_factory=dict)


class Order:
    """The clocks, and an allocator's pools: what a stream gave back is the next thing that it may be given."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        self._known: defaultdict[Who, Clock] = defaultdict(dict)
        self._freed: defaultdict[Who, deque[Block]] = defaultdict(deque)

    def snapshot(self, who: Who) -> Clock:
        """What is done once `who` has come to where it is now."""
        return dict(self._known[who])

    def join(self, who: Who, done: Clock) -> None:
        """From now on `who` comes behind all of `done`."""
        known = self._known[who]
        for other, at in done.items():
            known[other] = max(at, known.get(other, 0))

    def access(self, who: Who, block: Block, write: bool, what: str) -> None:
        """`who` reads or writes `block`, in the order in which it was told to."""
        if who is not None:
            self.join(who, self._known[None])  # it was issued by the host, behind what that has waited for
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
        """The program dropped `block`. May be called at any moment, on any thread."""
        for who in block.used:
            for other, at in list(self._known[who].items()):
                block.done[other] = max(at, block.done.get(other, 0))
        self._freed[block.owner].append(block)

    def allocate(self, who: Who, what: str) -> Block:
        """A block of `who`'s, which may be any that was given back to it."""
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
    """As reports call it."""
    if who is None:
        return "the host"
    return who[1].name + (f" of device {who[0]}" if who[0] else "")
