"""Device memory that is no part of any plan.

    there before      tensors of the program, from before the first plan
    reserve           for libraries, and for the allocator's own sake
    shared losses     what micro-batches that share a loss take beside the plan of single ones
    left free         for an allocator that has been short of room again and again
    fragments         for an allocator's pieces of memory that serve no request
    uploads           for inputs, in a pool of their own
    exchange          for buffers that gradients are exchanged in, where devices do that

The first four are not in what a search for a plan is given; fragments and uploads are found with the plan.
"""

from __future__ import annotations

from harmony_ds.device.base import Device
from harmony_ds.distributed import SingleProcess
from harmony_ds.scheduler.plan import Plan

_GRAINS = 64
"""Part of the budget, by which the room for shared losses grows where it has been too small."""
_FREE_PARTS, _MOST_FREE_PARTS = 32, 4
"""Parts of the budget; how many of them plans leave free at most for an allocator that is short of room again and again."""


class BesidePlans:
    """Bytes of the budget that plans of one model do not get.

    Attributes:
        shared_loss_bytes, left_free_bytes: what plans that are searched for from now on leave for that.
        fragment_bytes, upload_bytes: what the plan in force leaves for that.
    """

    def __init__(self, device: Device, world: SingleProcess, may_leave_free: bool) -> None:
        """Begin with nothing; `may_leave_free`: whether plans may be searched for that leave more free."""
        self._device = device
        self._world = world
        self._may_leave_free = may_leave_free
        self._before_bytes: int | None = None
        self.shared_loss_bytes = 0
        self.left_free_bytes = 0
        self.fragment_bytes = 0
        self.upload_bytes = 0

    @property
    def knows_before(self) -> bool:
        """Whether it has been noted what there is before the first plan."""
        return self._before_bytes is not None

    def note_before(self, nbytes: int) -> None:
        """Note the bytes of tensors that are there before the first plan."""
        self._before_bytes = nbytes

    @property
    def reserve_bytes(self) -> int:
        """The bytes of the budget that plans leave to libraries and to the allocator."""
        has_peers = self._device.count > 1 or self._world.size > 1
        return self._device.reserve_bytes() + (self._device.peer_reserve_bytes() if has_peers else 0)

    @property
    def fixed_bytes(self) -> int:
        """What no plan gets, whatever is left free: the reserve, and what is there before the first plan."""
        return self.reserve_bytes + (self._before_bytes or 0)

    def exchange_bytes(self, plan: Plan) -> int:
        """Return the device memory that is set aside for exchanging gradients as `plan` does."""
        return self._world.reduce_bytes(self._device) if plan.policy.reduces_on_device else 0

    def total_bytes(self, plan: Plan | None) -> int:
        """Return all that is no part of `plan`, the one in force, but for shared losses; None: there is none yet."""
        exchange_bytes = 0 if plan is None else self.exchange_bytes(plan)
        return self.fixed_bytes + self.fragment_bytes + self.upload_bytes + self.left_free_bytes + exchange_bytes

    def keep_for_shared_losses(self, nbytes: int) -> None:
        """Keep `nbytes`, or more than so far, for shared losses."""
        budget_bytes = self._device.budget_bytes
        grain = 1 if budget_bytes is None else budget_bytes // _GRAINS
        self.shared_loss_bytes = max(nbytes, self.shared_loss_bytes + grain)

    def leave_more_free(self) -> bool:
        """Leave one part more of the budget to the allocator; return whether that is tried.

        It is not where a plan was given or did not fit, and not beyond an eighth of the budget.
        """
        budget_bytes = self._device.budget_bytes
        if budget_bytes is None or not self._may_leave_free:
            return False
        more_bytes = budget_bytes // _FREE_PARTS
        if self.left_free_bytes + more_bytes > _MOST_FREE_PARTS * more_bytes:
            return False
        self.left_free_bytes += more_bytes
        return True

    def leave_nothing_free(self) -> None:
        """Leave nothing to the allocator from now on: the plan takes all of the budget."""
        self.fragment_bytes = self.upload_bytes = self.left_free_bytes = 0
        self._may_leave_free = False
