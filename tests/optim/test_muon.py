"""The ds_config's "Muon": DeepSpeed's own optimizer on the accumulated gradients, stepped pack by pack."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils import cpp_extension

from harmony_ds import ConfigError
from tests.engine.drive import config_of, engine_for, family, groups_of, means_of, seed_of
from tests.inside import assembly_of
from tests.oracle import assert_same, train_plainly

LLAMA = family("llama")
PARAMS: dict[str, Any] = {"muon_lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}
MUON = {"optimizer": {"type": "Muon", "params": PARAMS}}


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """DeepSpeed compiles its iteration, for minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def deepspeeds(model: nn.Module, given: Any = None, adam: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Return the optimizer that DeepSpeed makes of the ds_config, without an engine around it; `adam`: of the others."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params=PARAMS), model)
    groups = DeepSpeedEngine._muon_param_groups(list(model.parameters()) if given is None else given, PARAMS)
    return MuonWithAuxAdam(groups, adam_optimizer=adam, adam_optimizer_kwargs=options or {"fused": True})


def names_in_groups(optimizer: Any, named: dict[str, nn.Parameter]) -> list[set[str]]:
    name_of = {id(parameter): name for name, parameter in named.items()}
    return [{name_of[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_is_deepspeeds_on_the_accumulated_gradients(clip: float | None, tmp_path: Path) -> None:
    groups = groups_of(LLAMA, 4, 3)
    plain = LLAMA.build(0.1)
    losses = means_of(train_plainly(plain, groups, deepspeeds(plain), clip=clip, seed_of=seed_of))

    config = config_of(3, clip, {"pack_layers": 1}, **MUON)
    with engine_for(LLAMA.build(0.1), None, config) as engine:
        host = assembly_of(engine).runtime.optimizer
        assert host is not None and not host.steps_whole
        assert [engine.train_batch(iter(group)).item() for group in groups[:2]] == losses[:2]
        engine.save_checkpoint(tmp_path)
    model = LLAMA.build(0.1)
    with engine_for(model, None, config) as engine:
        engine.load_checkpoint(tmp_path)
        assert [engine.train_batch(iter(group)).item() for group in groups[2:]] == losses[2:]
    assert_same(model, plain, bitwise=True)


@pytest.mark.skipif(shutil.which(cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler")
def test_the_other_parameters_are_stepped_by_deepspeeds_adam_for_the_host() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    groups = groups_of(LLAMA, 2, 3)
    plain, model = LLAMA.build(0.1), LLAMA.build(0.1)
    optimizer = deepspeeds(plain, adam=DeepSpeedCPUAdam, adamw_mode=True)
    losses = means_of(train_plainly(plain, groups, optimizer, clip=None, seed_of=seed_of))
    muon = {"type": "Muon", "params": {**PARAMS, "torch_adam": False}}
    with engine_for(model, None, config_of(3, None, {"pack_layers": 1}, optimizer=muon)) as engine:
        assert type(engine.optimizer.aux_optimizer) is DeepSpeedCPUAdam
        assert [engine.train_batch(iter(group)).item() for group in groups] == losses
    assert_same(model, plain, bitwise=True)


def test_parameters_and_options_are_divided_as_deepspeed_divides_them() -> None:
    theirs_model, model = LLAMA.build(0.0), LLAMA.build(0.0)
    halves = [list(theirs_model.parameters())[:5], list(theirs_model.parameters())[5:]]
    theirs = deepspeeds(theirs_model, [{"params": halves[0]}, {"params": halves[1], "lr": 0.5, "weight_decay": 0.0}])
    own = list(model.parameters())
    given = [{"params": own[:5]}, {"params": own[5:], "lr": 0.5, "weight_decay": 0.0}]
    with engine_for(model, None, config_of(1, **MUON), model_parameters=given) as engine:
        ours = engine.optimizer
        assert type(ours.optimizer).__name__ == "MuonWithAuxAdam"
        named = dict(model.named_parameters())
        assert names_in_groups(ours, named) == names_in_groups(theirs, dict(theirs_model.named_parameters()))
        for one, other in zip(ours.param_groups, theirs.param_groups, strict=True):
            for key in ("use_muon", "lr", "momentum", "weight_decay", "ns_method", "betas", "eps"):
                assert one.get(key) == other.get(key)
        marks = {name: parameter.use_muon for name, parameter in named.items()}  # type: ignore[attr-defined]
    assert marks == {name: parameter.use_muon for name, parameter in theirs_model.named_parameters()}  # type: ignore[attr-defined]
    assert set(marks.values()) == {True, False}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"momentums": 0.9}, 'of Muon does not take "momentums".*momentum'),
        ({"per_head_muon": True}, "per_head_muon.*not supported"),
    ],
    ids=str,
)
def test_options_that_neither_takes_are_refused(params: dict[str, Any], message: str) -> None:
    config = config_of(1, optimizer={"type": "Muon", "params": params})
    with pytest.raises(ConfigError, match=message), engine_for(LLAMA.build(0.0), None, config):
        pass
