"""Processes that train one model, each on devices of its own: how they find each other, share memory and agree."""

from harmony_ds.distributed.agreement import PeerDiverged
from harmony_ds.distributed.join import join_world
from harmony_ds.distributed.single_process import ALONE, SingleProcess
from harmony_ds.distributed.world import World

__all__ = ["ALONE", "PeerDiverged", "SingleProcess", "World", "join_world"]
