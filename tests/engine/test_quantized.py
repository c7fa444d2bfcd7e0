"""Adapters on a quantized, frozen base: plain PyTorch's bits, and each byte of the base swapped in once a pack and pass."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.checkpoint import Layout, convert
from harmony_ds.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harmony_ds.errors import CheckpointError, ModelError
from tests import quantized
from tests.engine.drive import WHOLE, Groups, adamw, config_of, engine_for, loop, seed_of
from tests.inside import assembly_of
from tests.offload.test_disk import WEIGHTS, on
from tests.oracle import seed_generators, train_plainly

KINDS = list(quantized.KINDS)
ACCUMULATION = 3
GROUPS: Groups = [[quantized.batch(step * ACCUMULATION + i) for i in range(ACCUMULATION)] for step in range(2)]
BF16 = torch.bfloat16


def trained_by(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    return adamw([parameter for parameter in model.parameters() if parameter.requires_grad])


def train_both(
    build: Callable[[], nn.Module], groups: Groups = GROUPS, clip: float | None = None, **harmony: Any
) -> tuple[Any, nn.Module]:
    """Train in plain PyTorch and with an engine, and compare all bits; return the last step's swaps, and the model."""
    plain = build()
    expected = train_plainly(plain, groups, adamw_of(plain), clip=clip, seed_of=seed_of)
    model = build()
    optimizer = adamw_of(model)
    config = config_of(ACCUMULATION, clip, {"pack_layers": 1, **harmony})
    with engine_for(model, lambda _: optimizer, config) as engine:
        assert loop(engine, groups) == expected
        engine.finish_updates()
        report = engine.swap_report()
    wanted = trained_by(plain)
    for name, weight in trained_by(model).items():
        assert torch.equal(weight, wanted[name]), name
    return report, model


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_a_quantized_base_train_to_plain_pytorchs_bits(kind: str) -> None:
    train_both(lambda: quantized.build(kind), clip=0.5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "read in backward" in kind])
def test_weights_that_backward_reads_again_are_there_in_a_pack_that_is_not_recomputed(kind: str) -> None:
    train_both(lambda: quantized.build(kind), pack_layers=WHOLE)


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "torchao int8", "integer parameter"])
def test_a_base_and_adapters_in_bf16_train_to_plain_pytorchs_bits(kind: str) -> None:
    train_both(lambda: quantized.build(kind, BF16))


@pytest.mark.parametrize("kind", ["bitsandbytes NF4", "torchao int8"])
def test_fp32_adapters_beside_a_bf16_base_are_computed_with_as_they_are(kind: str) -> None:
    def build() -> nn.Module:
        model = quantized.build(kind, BF16, lora=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name and parameter.requires_grad)
        return model

    train_both(build)


@pytest.mark.parametrize("kind", ["hand-written wrapper", "bitsandbytes int8", "torchao NF4"])
@pytest.mark.parametrize("residency", ["auto", 2])
def test_resident_packs_of_a_quantized_base_train_to_the_same_bits(kind: str, residency: Any) -> None:
    train_both(lambda: quantized.build(kind), residency=residency)


class Experts(nn.Module):
    """The blocks' MLP as two quantized experts with adapters: each token goes to the one that a router chooses."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(quantized.WIDTH, 2, bias=False)
        self.experts = nn.ModuleList()
        for _ in range(2):
            linear = nn.Linear(quantized.WIDTH, quantized.WIDTH, bias=False).requires_grad_(False)
            base = quantized.KINDS[kind](linear)
            self.experts.append(quantized.LoraLinear(base, quantized.WIDTH, quantized.WIDTH, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            outputs = outputs + (chosen == number) * weights * expert(x)
        return outputs


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "torchao int8", "integer parameter"])
def test_quantized_experts_train_to_plain_pytorchs_bits(kind: str) -> None:
    def build() -> nn.Module:
        model = quantized.build(kind)
        for number, block in enumerate(model.model.layers):
            block.mlp = Experts(kind, number)
        return model

    train_both(build, clip=0.5)


@pytest.mark.deep
def test_a_base_eight_times_its_budget_trains_to_plain_pytorchs_bits() -> None:
    def build() -> nn.Module:
        return quantized.build("bitsandbytes NF4", layers=48)

    model = build()
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine:
        packed = assembly_of(engine).store.packed
        packed_bytes = sum(one.nbytes for one in packed.values())
    report, _ = train_both(build, device_memory_gib=packed_bytes / 8 / 2**30)
    assert report.ratio == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_packed_bytes_are_what_is_swapped_and_nothing_of_the_base_stays(kind: str) -> None:
    model = quantized.build(kind)
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        loop(engine, GROUPS[:1])
        engine.finish_updates()
        report = engine.swap_report()
        held = assembly_of(engine).store.buffers
    assert_swapped_once_a_pass(kind, model, report)
    assert all(b.nbytes < 1024 or name in held for name, b in model.named_buffers())


def assert_swapped_once_a_pass(kind: str, model: nn.Module, report: Any) -> None:
    """Each code goes in once forward and once backward; scales and zeros take at most an eighth of that."""
    wide = [p for p in model.parameters() if p.is_floating_point() and type(p) is nn.Parameter and p.dtype.itemsize > 1]
    beside = sum(parameter.nbytes for parameter in wide)
    swapped = report.host_to_device["weights"]
    expected = 2 * quantized.stored_bytes(kind, model)
    assert report.ratio == 1.0 and expected <= swapped <= 1.125 * expected + 2 * beside


def test_the_program_sees_the_same_base_before_and_after() -> None:
    kept = dict(quantized.build("hand-written wrapper").named_parameters())
    _, model = train_both(lambda: quantized.build("hand-written wrapper"))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, quantized.HalvedTensor):
            assert torch.equal(parameter.codes, kept[name].codes) and torch.equal(parameter.scale, kept[name].scale)


def refused(model: nn.Module) -> str:
    with pytest.raises(ModelError) as raised, engine_for(model, adamw, config_of(2)):
        pass
    return re.sub(r"\s+", " ", str(raised.value))


def test_a_quantized_weight_that_requires_a_gradient_is_refused_by_name() -> None:
    model = quantized.build("hand-written wrapper")
    weight = model.model.layers[1].mlp.up_proj.base.weight
    weight.requires_grad_(True)
    said = refused(model)
    assert "model.layers.1.mlp.up_proj.base.weight is a HalvedTensor" in said and "requires_grad_(False)" in said


class Sealed(Tensor):
    """A wrapper of which no inner tensor can be found."""

    @staticmethod
    def __new__(cls) -> Sealed:
        return Tensor._make_wrapper_subclass(cls, (4, 4))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Sealed()
        raise NotImplementedError(f"{func}")


def test_a_base_that_has_no_backward_pass_is_refused_with_the_way_out_and_evaluates() -> None:
    def in_4_bits(linear: nn.Linear) -> nn.Module:
        from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

        weight = Int4OpaqueTensor.from_hp(linear.weight.detach(), [1, 32])
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    plain, model = (quantized.build(in_4_bits) for _ in range(2))
    before = {name: one.clone() for name, one in trained_by(model).items()}
    said = "no backward pass.*torchao's int4 on CPUs.*bitsandbytes NF4.*torch says: derivative for aten::_weight_int4"
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine:
        with pytest.raises(ModelError, match=said):
            loop(engine, GROUPS[:1])
        with torch.no_grad():
            assert torch.equal(engine(**GROUPS[0][0]).logits, plain(**GROUPS[0][0]).logits)
        assert engine.usable
    assert all(torch.equal(one, before[name]) for name, one in trained_by(model).items())


def test_a_class_that_cannot_be_taken_apart_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(Sealed(), requires_grad=False)
    said = refused(model)
    assert "1.weight is a Sealed" in said and "__tensor_flatten__" in said


class Counting(quantized.Packed4Bit):
    """Codes that forward changes."""

    def forward(self, x: Tensor) -> Tensor:
        self.qweight += 0
        return super().forward(x)


class Replacing(quantized.Packed4Bit):
    """Codes that forward puts others in the place of."""

    def forward(self, x: Tensor) -> Tensor:
        self.qweight = self.qweight.clone()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Counting, Replacing])
def test_integer_buffers_that_forward_changes_are_refused_by_name(kind: type[nn.Module]) -> None:
    model = quantized.build("integer buffers")
    model.model.layers[1].mlp.up_proj.base.__class__ = kind
    with (
        engine_for(model, lambda _: adamw_of(model), config_of(2)) as engine,
        pytest.raises(ModelError, match=rf"the buffer 'qweight' of a {kind.__name__}.*torch.int64"),
    ):
        engine.train_batch(iter(GROUPS[0]))


class Looking(nn.Module):
    """A layer with a table that all such layers share, and a small counter."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("counter", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("table", table)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        return x * self.weight + self.table[0, :4]


def test_integer_buffers_that_are_small_or_shared_stay_on_the_device() -> None:
    table = torch.ones(2, 4096, dtype=torch.int32)
    model = nn.Sequential(nn.Sequential(Looking(table), Looking(table)), nn.Flatten(0))
    config = config_of(2)
    with engine_for(model, adamw, config) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).mean())
            engine.step()
        engine.finish_updates()
        assert not assembly_of(engine).store.packed
    assert model[0][0].counter.tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "torchao NF4", "integer buffers"])
def test_evaluation_reads_the_packed_base(kind: str) -> None:
    plain, model = quantized.build(kind), quantized.build(kind)
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine, torch.no_grad():
        plain.eval()
        engine.eval()
        for batch in GROUPS[0]:
            assert torch.equal(engine(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "torchao int8", "integer buffers"])
def test_a_packed_base_may_lie_on_a_disk(kind: str, tmp_path: Path) -> None:
    plain, model = quantized.build(kind), quantized.build(kind)
    expected = train_plainly(plain, GROUPS, adamw_of(plain), clip=None, seed_of=seed_of)
    optimizer = adamw_of(model)
    config = config_of(ACCUMULATION, **on(tmp_path, WEIGHTS))
    with engine_for(model, lambda _: optimizer, config) as engine:
        assert loop(engine, GROUPS) == expected
    wanted = trained_by(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(model).items())


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "hand-written wrapper", "integer buffers"])
def test_a_checkpoint_holds_the_packed_base(kind: str, tmp_path: Path) -> None:
    plain = quantized.build(kind)
    expected = train_plainly(plain, GROUPS, adamw_of(plain), clip=None, seed_of=seed_of)
    first = quantized.build(kind)
    with engine_for(first, lambda _: adamw_of(first), config_of(ACCUMULATION)) as engine:
        loop(engine, GROUPS[:1])
        engine.save_checkpoint(tmp_path)
    resumed = quantized.build(kind)
    with torch.no_grad():
        for parameter in resumed.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    with engine_for(resumed, lambda _: adamw_of(resumed), config_of(ACCUMULATION)) as engine:
        store = assembly_of(engine).store
        for name in store.packed:
            store.weight(name).zero_()
        engine.load_checkpoint(tmp_path)
        assert loop(engine, GROUPS[1:]) == expected[1:]
    wanted = trained_by(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(resumed).items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_that_is_saved_while_the_engine_runs_is_that_of_the_model(kind: str, tmp_path: Path) -> None:
    model, plain = quantized.build(kind), quantized.build(kind)
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine:
        kept = {key: one for key, one in engine.module.state_dict().items() if type(one) is not quantized.HalvedTensor}
        torch.save(kept, tmp_path / "file")
        expected = plain.state_dict()
    found = torch.load(tmp_path / "file", weights_only=False)
    for key, one in found.items():
        assert type(one) is type(expected[key])
        assert all(map(torch.equal, parts_of(one), parts_of(expected[key]))), key


def parts_of(tensor: Any) -> list[Tensor]:
    if hasattr(type(tensor), "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]
    return [tensor.detach().as_subclass(Tensor).contiguous().view(-1).view(torch.uint8)]


@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "torchao int8", "integer parameter"])
def test_exports_of_plain_weights_refuse_a_packed_base_by_name(kind: str, tmp_path: Path) -> None:
    model = quantized.build(kind)
    says = r"quantized weights.*model\.layers\.0\.self_attn\.q_proj\.base.*exclude_frozen_parameters=True"
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine:
        loop(engine, GROUPS[:1])
        engine.save_checkpoint(tmp_path / "whole")
        with pytest.raises(CheckpointError, match=says) as raised:
            engine.save_16bit_model(tmp_path)
        assert len(str(raised.value)) < 500  # without what the quantization is made of
        engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
    trained = trained_by(model)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(saved[name], weight) for name, weight in trained.items())
    for layout in (Layout.UNIVERSAL, Layout.HF):
        with pytest.raises(CheckpointError, match=says):
            convert(tmp_path / "whole", tmp_path / layout.value, layout)
    with pytest.raises(CheckpointError, match=says):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "whole")
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "whole", exclude_frozen_parameters=True)
    assert all(torch.equal(found[name], weight) for name, weight in trained.items())


def test_exports_of_plain_weights_hold_codes_in_buffers_as_they_are(tmp_path: Path) -> None:
    model = quantized.build("integer buffers")
    with engine_for(model, lambda _: adamw_of(model), config_of(ACCUMULATION)) as engine:
        loop(engine, GROUPS[:1])
        engine.save_checkpoint(tmp_path)
        engine.save_16bit_model(tmp_path)
    for found in (get_fp32_state_dict_from_zero_checkpoint(tmp_path), torch.load(tmp_path / "pytorch_model.bin")):
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(one, found[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        ("bitsandbytes NF4", "bitsandbytes FP4"),
        ("bitsandbytes NF4", "torchao int8"),
        ("torchao int8", "torchao float8"),
        ("bitsandbytes NF4, parametrized", quantized.bitsandbytes_parametrized("fp4")),
    ],
)
def test_a_checkpoint_of_another_quantization_is_refused_before_anything_is_restored(
    saved: str, other: str | Callable[..., nn.Module], tmp_path: Path
) -> None:
    first, second = quantized.build(saved), quantized.build(other)
    with engine_for(first, lambda _: adamw_of(first), config_of(ACCUMULATION)) as engine:
        engine.save_checkpoint(tmp_path)
    before = {name: weight.clone() for name, weight in trained_by(second).items()}
    with (
        engine_for(second, lambda _: adamw_of(second), config_of(ACCUMULATION)) as engine,
        pytest.raises(CheckpointError, match=r"q_proj\.base.* in the checkpoint and .* in this model"),
    ):
        engine.load_checkpoint(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in trained_by(second).items())


@pytest.fixture
def repacks_for_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let bitsandbytes take the CPU for one with AVX512-BF16, where evaluation repacks 4-bit weights in place.

    Its product with such weights is a downloaded kernel; here, one that unpacks a copy of them.
    """
    import bitsandbytes
    from bitsandbytes import functional

    def product(x: Tensor, weight: Tensor, out: Tensor | None, state: Any) -> Tensor:
        assert state.packing_format_for_cpu
        state = copy.copy(state)
        state.original_nested, absmax = False, state.absmax.T.reshape(-1).float()
        codes, state = functional._convert_weight_packed_for_cpu_inverse(weight.detach().clone(), state)
        state.absmax = absmax
        return nn.functional.linear(x, functional.dequantize_4bit(codes, state).to(x.dtype))

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(functional, "gemv_4bit", product)


@pytest.mark.usefixtures("repacks_for_evaluation")
@pytest.mark.parametrize("kind", ["bitsandbytes NF4, double", "bitsandbytes FP4"])
@pytest.mark.parametrize("harmony", [{"pack_layers": 1}, {"residency": 2}])
def test_weights_that_evaluation_repacks_are_trained_beside_as_if_it_had_not(
    kind: str, harmony: dict[str, Any], tmp_path: Path
) -> None:
    plain, model, untouched = (quantized.build(kind) for _ in range(3))
    optimizer = adamw_of(model)
    stepped = adamw_of(plain)
    config = config_of(ACCUMULATION, None, harmony)
    with engine_for(model, lambda _: optimizer, config) as engine:
        for step, group in enumerate([*GROUPS, *GROUPS]):
            expected = train_plainly(
                plain, [group], stepped, clip=None, seed_of=lambda _, i, step=step: seed_of(step, i)
            )
            assert loop(engine, [group]) == expected
            evaluated = copy.deepcopy(plain).eval()
            engine.eval()
            with torch.no_grad():
                for batch in group:
                    assert torch.equal(engine(**batch).logits, evaluated(**batch).logits)
            engine.train()
        assert evaluated.model.layers[0].mlp.up_proj.base.weight.quant_state.packing_format_for_cpu
        engine.save_checkpoint(tmp_path)
        saved = {key: one.clone() for key, one in engine.module.state_dict().items() if "base" in key}
    assert all(map(torch.equal, saved.values(), (untouched.state_dict()[key] for key in saved)))
    wanted = trained_by(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(model).items())
    resumed = quantized.build(kind)
    with engine_for(resumed, lambda _: adamw_of(resumed), config) as engine:
        engine.load_checkpoint(tmp_path)
        expected = train_plainly(plain, GROUPS[:1], stepped, clip=None, seed_of=lambda _, i: seed_of(4, i))
        assert loop(engine, GROUPS[:1]) == expected


@pytest.mark.usefixtures("repacks_for_evaluation")
def test_a_micro_batch_in_eval_mode_leaves_the_weights_of_the_next_ones_as_they_were() -> None:
    """Layers whose inputs need no gradient repack their weights in eval mode, also where adapters are trained."""

    def build() -> nn.Module:
        model = quantized.build("bitsandbytes NF4")
        model.model.layers[0].input_layernorm.requires_grad_(False)
        return model

    plain, model = build(), build()
    expected = []
    optimizers = adamw_of(plain), adamw_of(model)
    for step, group in enumerate(GROUPS):
        for place, batch in enumerate(group):
            base = plain.model.layers[0].self_attn.q_proj.base.weight
            bases = [one.base.weight for one in plain.modules() if isinstance(one, quantized.LoraLinear)]
            before = [(one, one.data.clone(), copy.deepcopy(vars(one.quant_state))) for one in bases]
            plain.train(place != 1)
            seed_generators(seed_of(step, place))
            loss = plain(**batch).loss
            (loss / ACCUMULATION).backward()
            expected.append(loss.item())
            assert bool(getattr(base.quant_state, "packing_format_for_cpu", False)) == (place == 1)
            for one, data, state in before:
                one.data = data
                vars(one.quant_state).clear()
                vars(one.quant_state).update(state)
        optimizers[0].step()
        optimizers[0].zero_grad()
    losses = []
    with engine_for(model, lambda _: optimizers[1], config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        for group in GROUPS:
            for place, batch in enumerate(group):
                engine.train(place != 1)
                losses.append(engine(**batch).loss)
                engine.backward(losses[-1])
                engine.step()
        assert [loss.item() for loss in losses] == expected
    wanted = trained_by(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in trained_by(model).items())
