"""Processes that train one model, each on devices of its own: how they find each other, share memory and agree.

**Find each other** (process_group.py, join.py). A launcher starts the processes, `torch.distributed` lets them meet, and
`join_world` compares what must be the same everywhere (the model, settings) and finds out which of them are on one server.
The first process of each server makes a file in memory, and the others open it.

**Share** (shared_memory.py). The weights, masters and optimizer state of a model exist once on a server. Each process
updates its own piece of every parameter, and reads all of it.

**Agree, in a step.** For G micro-batches, P packs, and N processes on S servers:

| when | what | how often | carried by |
|---|---|---|---|
| a micro-batch is queued | has any process to measure it first? | G | the board |
| the step begins | number of micro-batches, hyper-parameters; what to measure, what was looked at | 4 | the board |
| a pack is swapped in, shared | begin; each process's share of the weights | 2P - 1 | the board; gloo or NCCL |
| a pack's backward is done | who has which gradients | P | the board |
| the same, reduced on devices | gradients, added by rank | P | all-to-all of gloo or NCCL |
| the same, reduced on the host | gradients, added by rank | P | slots in shared memory |
| gradients are clipped | begin to update; each process's part of the norm | 1 | the board |
| a pack was updated | counts of each parameter's updates | P | the board |
| the step ends | the most memory, the mean loss | 2 | the board; gloo or NCCL |

The board (board.py) is shared memory in which processes post and poll; agreement.py, update_progress.py and slots.py stand
on it. Between servers the first processes of each pass agreements on (servers.py), and gradients go from piece to piece
(exchange.py). torch.distributed carries gradients, weights and objects; docs/parallel.md says why not agreements.

**Fail.** An error of one process is told to the others at their next agreement, where they raise PeerFailedError with its
rank and text. A process that can never go on says so on the board, and one that is gone is noticed by whoever waits for it.
"""

from harmony_ds.distributed.agreement import PeerDiverged
from harmony_ds.distributed.join import join_world
from harmony_ds.distributed.single_process import SINGLE_PROCESS, SingleProcess
from harmony_ds.distributed.world import World

__all__ = ["SINGLE_PROCESS", "PeerDiverged", "SingleProcess", "World", "join_world"]
