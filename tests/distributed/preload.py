"""Imports of the tests' processes, done before they begin: each of them would take two seconds for the last ones."""

import pytest  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import harmony_ds.engine  # noqa: F401
import tests.distributed.training
import tests.oracle
import tests.patches  # noqa: F401
