"""What the processes of the tests have imported before they begin."""

import torch._dynamo
import torch.distributed.fsdp

import harmony_ds.engine.start
import tests.families
import tests.oracle  # noqa: F401
