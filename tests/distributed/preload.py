"""Imports of the tests' processes, done before they begin."""

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import harmony_ds.engine  # noqa: F401
import tests.families
import tests.oracle
import tests.patches  # noqa: F401
