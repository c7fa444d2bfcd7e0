"""Several processes that train one model, each on a device of its own: who they are, what they share, how they agree."""

from harmony_ds.parallel.alone import Alone
from harmony_ds.parallel.board import PeerStrayed
from harmony_ds.parallel.join import join_world
from harmony_ds.parallel.world import World

__all__ = ["Alone", "PeerStrayed", "World", "join_world"]
