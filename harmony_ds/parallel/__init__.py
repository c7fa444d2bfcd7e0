"""Several processes that train one model, each on a device of its own: who they are, what they share, how they agree."""

from harmony_ds.parallel.board import PeerDiverged
from harmony_ds.parallel.join import join_world
from harmony_ds.parallel.single_process import SingleProcess
from harmony_ds.parallel.world import World

__all__ = ["PeerDiverged", "SingleProcess", "World", "join_world"]
