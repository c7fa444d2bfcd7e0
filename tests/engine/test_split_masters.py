"""`harmony.split_masters`: the bits of masters apart, in 2 bytes a parameter less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.errors import ConfigError, OptimizerError
from harmony_ds.offload.split_masters import SplitMasters
from harmony_ds.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.checkpoint.runs import Setup, assert_equal, train_and_resume
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, loop, train_groups
from tests.families import Family, build_seeded

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(
    one: Family, split: bool, optimizer: Any = None, clip: float | None = 0.5, **more: Any
) -> dict[str, Tensor]:
    """Weights, masters and states after three steps."""
    config = config_of(3, clip, {"pack_layers": 2, "split_masters": split}, **BF16, **more)
    if optimizer is None:
        config["optimizer"] = ADAM
    with engine_for(one.build(0.1), optimizer, config) as engine:
        loop(engine, groups_of(one, 3, 3))
        return values_of(engine)


def values_of(engine: HarmonyEngine) -> dict[str, Tensor]:
    engine.finish_updates()
    found = {f"weight {name}": p.detach().clone() for name, p in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            found[f"master {name}"] = master
    for index, group in enumerate(engine.optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            for key, value in engine.optimizer.state[parameter].items():
                found[f"{key} {index} {place}"] = torch.as_tensor(value).clone()
    return found


def both(
    configs: Iterable[Any], optimizer: Any = None, model: Any = lambda: LLAMA.build(0.0)
) -> Iterator[HarmonyEngine]:
    """Yield an engine with each of two configs, for training that gives the same."""
    results = []
    for config in configs:
        with engine_for(model(), optimizer, config) as engine:
            yield engine
            results.append(values_of(engine))
    assert_equal(*results)


def split_or_not(accumulation: int, **more: Any) -> Iterator[Any]:
    return (config_of(accumulation, None, {"split_masters": split}, **BF16, **more) for split in (True, False))


@pytest.mark.parametrize("one", [LLAMA, family("t5"), family("mixtral")], ids=str)
@pytest.mark.parametrize("optimizer", [None, adamw, momentum])
def test_weights_masters_and_states_are_those_of_masters_apart(one: Family, optimizer: Any) -> None:
    assert_equal(trained(one, True, optimizer), trained(one, False, optimizer))


def test_gradients_in_bf16_and_parameters_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"clip": None, "data_types": {"grad_accum_dtype": "bf16"}}
    apart = trained(LLAMA, False, adamw), trained(LLAMA, False, **more)
    monkeypatch.setattr(SplitMasters, "block", 128)
    assert_equal(trained(LLAMA, True, adamw), apart[0])
    assert_equal(trained(LLAMA, True, **more), apart[1])


class Gated(nn.Module):
    """A parameter without dimensions, as CLIP's logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale).square().mean()


@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_a_parameter_without_dimensions(optimizer: Any) -> None:
    for engine in both(split_or_not(1), optimizer, lambda: build_seeded(Gated)):
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)))
            engine.step()


@pytest.mark.parametrize("split", [True, False])
def test_the_optimizers_own_state_dict_keeps_its_dtypes(split: bool) -> None:
    config = config_of(1, None, {"split_masters": split}, **BF16)
    with engine_for(LLAMA.build(0.0), adamw, config) as engine:
        train_groups(engine, groups_of(LLAMA, 2, 1))
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        assert {v.dtype for s in engine.optimizer.state.values() for v in s.values()} == {torch.float32}
        train_groups(engine, groups_of(LLAMA, 1, 1))


def test_the_host_holds_twelve_bytes_a_parameter() -> None:
    model = LLAMA.build(0.0)
    count = sum(parameter.numel() for parameter in model.parameters())
    config = config_of(2, None, {"split_masters": True}, **BF16, optimizer=ADAM)
    with engine_for(model, None, config) as engine:
        train_groups(engine, groups_of(LLAMA, 2, 2))
        held = engine.memory_report().host_bytes
    assert held["weights"] + held["masters"] + held["optimizer"] == pytest.approx(12 * count, rel=0.02)


def by_alias(parameter: nn.Parameter) -> None:
    parameter.data.view(-1)[3] = 0.25


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.clamp_(-0.01, 0.01)


def by_name(parameter: nn.Parameter) -> None:
    master = safe_get_full_fp32_param(parameter)
    assert master is not None
    safe_set_full_fp32_param(parameter, master * 0.7)


def not_at_all(parameter: nn.Parameter) -> None:
    parameter.detach().sum().item()


@pytest.mark.parametrize("write", [by_alias, in_place, by_name, not_at_all])
def test_what_is_written_by_hand_between_steps_is_trained_on(write: Any) -> None:
    for engine in both(split_or_not(2, optimizer=ADAM)):
        groups = groups_of(LLAMA, 3, 2)
        parameter = engine.module.model.layers[1].mlp.up_proj.weight
        kept = parameter.data
        for group in groups:
            train_groups(engine, [group])
            write(parameter)
        kept[0, 0] = 0.125  # through memory that was taken before all steps
        train_groups(engine, groups[:1])


def test_reading_a_weight_within_a_step_leaves_its_master_alone() -> None:
    for engine in both(split_or_not(2, optimizer=ADAM)):
        parameter = engine.module.model.layers[1].mlp.up_proj.weight
        parameter.register_hook(lambda gradient, p=parameter: gradient + 0.01 * p.detach().to(gradient.dtype))
        kept = parameter.data
        for group in groups_of(LLAMA, 3, 2):
            for batch in group:
                engine.backward(engine(**batch).loss)
                parameter.detach().norm().item()
                engine.step()
        del kept
        train_groups(engine, groups_of(LLAMA, 1, 2))
        parameter.detach().norm().item()
        train_groups(engine, groups_of(LLAMA, 1, 2))


@pytest.mark.parametrize("split", [True, False])
def test_what_is_written_through_memory_that_is_then_dropped_is_trained_on(split: bool) -> None:
    config = config_of(1, None, {"split_masters": split}, **BF16, optimizer={"type": "AdamW", "params": {"lr": 0.0}})
    with engine_for(LLAMA.build(0.0), None, config) as engine:
        parameter = engine.module.model.layers[1].mlp.up_proj.weight
        first, _ = parameter.data.chunk(2)
        train_groups(engine, groups_of(LLAMA, 1, 1))
        first.fill_(0.5)
        del first
        train_groups(engine, groups_of(LLAMA, 1, 1))
        assert (parameter.detach()[: len(parameter) // 2] == 0.5).all()


@pytest.mark.parametrize(("saved", "resumed"), [(True, True), (True, False), (False, True)])
def test_checkpoints_are_those_of_masters_apart(tmp_path: Path, saved: bool, resumed: bool) -> None:
    def setup(split: bool) -> Setup:
        return Setup(optimizer=None, config={**BF16, "optimizer": ADAM}, harmony={"split_masters": split})

    assert_equal(*train_and_resume(setup(saved), setup(resumed), tmp_path, values_of))


@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True}}])
def test_other_precisions_are_refused_with_both_dtypes(precision: dict[str, Any]) -> None:
    config = config_of(1, None, {"split_masters": True}, **precision, optimizer=ADAM)
    with pytest.raises(ConfigError, match=r"weights are torch\.float"), engine_for(LLAMA.build(0.0), None, config):
        pass


def test_an_optimizer_that_needs_whole_parameters_is_refused_by_name() -> None:
    config = config_of(1, None, {"split_masters": True}, **BF16)
    with (
        pytest.raises(OptimizerError, match=r"Adafactor.*block by block"),
        engine_for(LLAMA.build(0.0), torch.optim.Adafactor, config),
    ):
        pass
