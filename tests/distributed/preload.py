"""Imports of the tests' processes, done before they begin: each of them would take two seconds for the last ones."""

# ruff: noqa: F401

import pytest
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama

import benchmarks.kill.several
import harmony_ds.engine
import tests.distributed.training
import tests.oracle
import tests.patches
