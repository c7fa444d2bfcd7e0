"""What the earlier runs of a step have left on the device and the host, and how much of it stays when a run is undone."""

from __future__ import annotations

import enum


class Leftovers(enum.Enum):
    """What stays of the earlier runs of a step when a run, or the whole step, is undone."""

    NONE = "nothing of the step; resident packs stay, without gradients"
    COPIES = "device copies of unlayered parameters, to whose leaves graphs of other micro-batches lead"
    COPIES_AND_GRADIENTS = "these copies, and the gradients that have accumulated on the device and the host"
