"""The engine on CUDA: `make test-gpu`. Exactness, peaks, no host synchronization, streams under injected delays."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from torch import nn

import harmony_ds
from harmony_ds.config.ablations import ABLATIONS, Ablation
from harmony_ds.device import CudaDevice, DeviceGroup, Stream
from harmony_ds.utils import safe_get_full_fp32_param
from tests.engine.drive import engine_for, groups_of, sgd, train_groups
from tests.engine.failing import Mishap, Trap, Trapped
from tests.families import FAMILIES, Family, build_transformer
from tests.oracle import assert_same, largest_difference, with_floating_dtype
from tests.runtime.test_lane import model_and_lane
from tests.simdevice.test_engine_steady import Model

pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SEED, GROUP, STEPS = 5, 4, 3
LOW_PRECISION = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "opt")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    gc.collect()
    torch.cuda.empty_cache()  # budgets are limits of what the process holds: no test is to find what others have left
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def config(**harmony: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GROUP,
        "gradient_clipping": 0.5,
        "harmony": {"device": "cuda", "seed": SEED, **harmony},
    }


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_a_chain_of_engines_divides_gradients_once() -> None:
    """Hooks of a backward pass on a GPU run on a thread of autograd's, unless the engine has them run on its own."""
    for by_engine in (False, True):
        torch.manual_seed(1)
        models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        plain = [copy.deepcopy(model).cuda() for model in models]
        x = torch.randn(4, 8, device="cuda")
        (plain[1](plain[0](x)).sum() / GROUP).backward()
        with engine_for(models[0], sgd, config()) as first, engine_for(models[1], sgd, config()) as second:
            output = second(first(x))
            output.sum().item()  # its forward pass runs, so that the program's own backward pass comes to its output
            if by_engine:
                second.backward(output.sum())
            else:
                output.sum().backward()
            for model, expected in zip(models, plain, strict=True):
                for parameter, same in zip(model.parameters(), expected.parameters(), strict=True):
                    assert parameter.grad is not None
                    torch.testing.assert_close(parameter.grad.cpu(), same.grad.cpu())


def on_cuda(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def train_plainly_on_cuda(
    model: nn.Module, groups: list[list[dict[str, Any]]], dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Forward and backward on the GPU; the update on the host, so that both sides round it alike. The masters."""
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=1e-2)
    for p in model.parameters():
        p.data = p.data.to("cuda", dtype)
    for b in model.buffers():
        b.data = b.data.cuda()
    for step, group in enumerate(groups):
        sums: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(group):
            torch.manual_seed(harmony_ds.micro_batch_seed(SEED, step, index))
            inputs = with_floating_dtype(on_cuda(batch), dtype)
            (model(**inputs).loss * scale / len(group)).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name] = p.grad.float() if name not in sums else sums[name] + p.grad.float()
                    p.grad = None
        for name, master in masters.items():
            master.grad = sums[name].cpu() / scale if name in sums else None
        torch.nn.utils.clip_grad_norm_(masters.values(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    model.cpu()
    return {name: master.detach() for name, master in masters.items()}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("pack_layers", [1, 3])
def test_weights_are_those_of_plain_accumulation(family: Family, pack_layers: int) -> None:
    model, plain = family.build(0.1).train(), family.build(0.1).train()
    if hasattr(plain, "config") and getattr(plain.config, "use_cache", None):
        plain.config.use_cache = False
    groups = groups_of(family, STEPS, GROUP)
    train_plainly_on_cuda(plain, groups)
    with engine_for(model, sgd, config(pack_layers=pack_layers)) as engine:
        train_groups(engine, groups)
        engine.finish_updates()
        report = engine.memory_report()
    # Kernels with atomic additions (embedding gradients, scatter) round by chance, in plain PyTorch too.
    assert_same(model, plain, False, relative=2e-5)
    assert report.device_peak_bytes <= report.planned_peak_bytes + report.beside_bytes


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in LOW_PRECISION], ids=lambda family: family.name)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_updates_in_low_precision_are_those_of_plain_accumulation(family: Family, precision: str) -> None:
    """As a whole: a part whose gradient is nothing but rounding may differ, what the model learns may not.

    On the CPU the largest difference is T5's, 3 % of what moved in bf16: its position biases are used by every layer, and
    sums in half precision round by their order.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scale = 1.0 if precision == "bf16" else 128.0
    before = {name: p.detach().clone() for name, p in family.build(0.1).named_parameters()}
    model, plain = family.build(0.1).train(), family.build(0.1).train()
    groups = groups_of(family, STEPS, GROUP)
    masters = train_plainly_on_cuda(plain, groups, dtype, scale)
    settings = config(pack_layers=2) | {precision: {"enabled": True}}
    if precision == "fp16":
        settings[precision]["loss_scale"] = scale
    with engine_for(model, sgd, settings) as engine:
        train_groups(engine, [[with_floating_dtype(batch, dtype) for batch in group] for group in groups])
        engine.finish_updates()
        own = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    differing = sum(float((own[name] - masters[name]).square().sum()) for name in masters) ** 0.5
    moved = sum(float((masters[name] - before[name]).square().sum()) for name in masters) ** 0.5
    assert moved > 0
    assert differing <= 0.05 * moved


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole, first, resumed = llama(), llama(), llama()
    data = batches()
    groups = [[next(data) for _ in range(GROUP)] for _ in range(4)]
    adam = {**config(pack_layers=2), "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with engine_for(whole, None, adam) as engine:
        train_groups(engine, groups)
    with engine_for(first, None, adam) as engine:
        train_groups(engine, groups[:2])
        engine.save_checkpoint(str(tmp_path))
    with engine_for(resumed, None, adam) as engine:
        engine.load_checkpoint(str(tmp_path))
        train_groups(engine, groups[2:])
    assert_close(resumed, whole)


def llama(hidden: int = 256, layers: int = 6) -> nn.Module:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": layers}
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": 512}
    return build_transformer("LlamaForCausalLM", **heads, **shape, use_cache=False)


def batches() -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, 512, (2, 64), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def decoder() -> nn.Module:
    """A language model of plain torch operations, none of which waits for the device."""
    torch.manual_seed(0)
    return Model(width=256, layers=6, words=512, dropout=0.0).train()


def ids() -> Iterator[dict[str, Any]]:
    return ({"ids": batch["input_ids"]} for batch in batches())


def fast_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def assert_close(model: nn.Module, expected: nn.Module, most: float = 1e-5) -> None:
    assert max(relative for _, relative in largest_difference(model, expected).values()) <= most


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


STEADY: dict[str, dict[str, Any]] = {
    "whole calls": {},
    "joined calls": {"micro_batch": {"forward": 8, "backward": 4}},
    "slices": {"micro_batch": {"forward": 1, "backward": 1}},
    "tiles of tokens": {"tokens": {"head": 48, "layers": 32}},
}


@pytest.mark.parametrize("harmony", STEADY.values(), ids=STEADY)
def test_no_host_synchronization_in_the_steady_state(harmony: dict[str, Any]) -> None:
    with engine_for(decoder(), torch.optim.AdamW, config(pack_layers=2, stash="host", **harmony)) as engine:
        data = ids()
        for _ in range(2):
            engine.train_batch(data)
        with no_synchronization():
            loss = engine.train_batch(data)
        assert loss.isfinite()


def test_recording_a_step_synchronizes_nothing_and_sees_every_task() -> None:
    with engine_for(decoder(), fast_sgd, config(pack_layers=1, stash="host")) as engine:
        data = ids()
        for _ in range(2):
            engine.train_batch(data)
        with engine.record_steps() as steps, no_synchronization():
            engine.train_batch(data)
    step = steps[0]
    assert len([span for span in step.spans if span.stream == "host" and span.tasks]) == len(step.tasks)
    for stream in ("swap_in", "compute", "swap_out", "update"):
        row = [span for span in step.spans if span.stream == stream]
        assert row
        # Device and host clocks are brought together to within a fraction of a millisecond.
        assert all(-1.0 <= span.begin_ms <= span.end_ms for span in row)
        assert all(one.end_ms <= other.begin_ms + 0.01 for one, other in itertools.pairwise(row))


class Delayed(CudaDevice):
    """Every copy is issued behind a random delay on its stream: what is not ordered by events goes wrong."""

    def __init__(self, seed: int, logical: int = 1) -> None:
        super().__init__(0, None, logical=logical)
        self._chance = torch.Generator().manual_seed(seed)

    def on(self, stream: Stream) -> Any:
        context = super().on(stream)
        cycles = int(torch.randint(0, 2_000_000, (), generator=self._chance))
        with super().on(stream):
            torch.cuda._sleep(cycles)
        return context


def trained(settings: dict[str, Any], seed: int | None = None, devices: int = 1) -> nn.Module:
    """A model whose steps do not wait for the device themselves: that would hide most of what may go wrong."""
    model, data = decoder(), ids()
    members = [] if seed is None else [Delayed(seed + number, devices) for number in range(devices)]
    device = {"device": DeviceGroup(members) if devices > 1 else members[0]} if members else {}
    with engine_for(model, fast_sgd, settings, **device) as engine:
        for _ in range(3):
            engine.train_batch(data)
        report = engine.memory_report()
    assert report.device_peak_bytes <= report.planned_peak_bytes + report.beside_bytes
    return model


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_results_do_not_change_when_streams_are_delayed(stash: str, clip: float) -> None:
    settings = {**config(pack_layers=1, stash=stash), "gradient_clipping": clip}
    expected = trained(settings)
    for seed in (1, 2):
        assert_close(trained(settings, seed), expected)


@pytest.mark.parametrize(("devices", "stash"), [(2, "device"), (3, "host"), (4, "device")])
def test_logical_devices_of_one_gpu_train_as_one_when_streams_are_delayed(devices: int, stash: str) -> None:
    settings = config(pack_layers=1, stash=stash)
    assert_close(trained(settings, 1, devices), trained(settings))


SWITCHED = [a for a in ABLATIONS if not a.rounds_on_cuda and not a.device]


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("ablation", SWITCHED, ids=lambda ablation: ablation.name)
def test_switches_change_no_result_under_delayed_streams(ablation: Ablation, clip: float) -> None:
    settings = {**config(pack_layers=2, residency="off"), "gradient_clipping": clip}
    assert_close(trained(ablation.applied(settings), 3), trained(settings))


def test_a_budget_below_the_weights_is_enough() -> None:
    model = llama(hidden=1024, layers=64)
    budget = sum(p.numel() * 4 for p in model.parameters()) // 2
    with engine_for(model, fast_sgd, config(device_memory_gib=budget / 2**30)) as engine:
        data = batches()
        losses = [engine.train_batch(data).item() for _ in range(2)]
        report = engine.memory_report()
    assert all(loss > 0 for loss in losses)
    assert report.device_peak_bytes <= report.planned_peak_bytes + report.beside_bytes <= budget
    assert torch.cuda.max_memory_reserved() <= budget


def test_the_allocator_is_not_short_of_room_from_the_third_step_on() -> None:
    model = llama(hidden=1024, layers=32)
    budget = sum(p.numel() * 4 for p in model.parameters())
    settings = {**config(device_memory_gib=budget / 2**30), "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    with engine_for(model, None, settings) as engine:
        data, retries = batches(), []
        for _ in range(5):
            engine.train_batch(data)
            retries.append(engine.memory_report().allocator_retries)
        report = engine.memory_report()
    assert retries[2:] == [retries[1]] * 3
    assert report.reserved_bytes is not None
    assert report.device_peak_bytes <= report.reserved_bytes <= budget


def test_after_out_of_memory_a_larger_budget_trains_as_if_nothing_had_happened() -> None:
    expected, model, data = llama(), llama(), batches()
    group = [next(data) for _ in range(GROUP)]
    with engine_for(expected, fast_sgd, config(pack_layers=1)) as engine:
        engine.train_batch(iter(group))

    before = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()  # a budget is for what the allocator asks CUDA for: what it keeps, it may use
    # A layer's weights and gradients take 5 MiB, and `initialize` refuses less; activations come beside them.
    budget = CudaDevice(0).reserve_bytes() + 6 * 2**20
    with (
        engine_for(model, fast_sgd, config(pack_layers=1, device_memory_gib=budget / 2**30)) as engine,
        pytest.raises(harmony_ds.DoesNotFitError, match="libraries'"),
    ):
        engine.train_batch(iter(group))
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    with engine_for(model, fast_sgd, config(pack_layers=1)) as engine:
        engine.train_batch(iter(group))
    assert_close(model, expected)


def test_after_a_failure_nothing_stays_page_locked_and_no_copy_is_lost() -> None:
    models = []
    for fails in (False, True):
        model, trap = llama(), Trap(0)
        layer = model.model.layers[2]
        layer.mlp = Trapped(layer.mlp, trap, "backward")  # whether it will fail can be seen in no forward pass
        device = Delayed(4)
        with engine_for(model, fast_sgd, config(pack_layers=1, stash="host"), device=device) as engine:
            data = batches()
            engine.train_batch(data)
            group = [next(data) for _ in range(GROUP)]
            if fails:
                trap.arm()
                with pytest.raises(Mishap):
                    engine.train_batch(iter(group))
            for _ in range(2):
                engine.train_batch(iter(group))
        assert not device._registered
        models.append(model)
    assert_close(models[1], models[0])


def test_a_failed_registration_does_not_surface_in_the_next_launch() -> None:
    device = CudaDevice(0)
    buffer = device.host_empty(1024, torch.float32)
    assert int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), 4096, 0)) != 0  # it is already
    device._clear_last_error()
    assert torch.ones(3, device="cuda").add_(1).tolist() == [2.0] * 3
    device.host_free(buffer)


def test_workers_that_are_forked_within_training_change_nothing() -> None:
    models = [llama(), llama()]
    for model, workers in zip(models, (0, 2), strict=True):
        with engine_for(model, fast_sgd, config(pack_layers=1, stash="host")) as engine:
            data = batches()
            engine.train_batch(data)
            loader = iter(torch.utils.data.DataLoader(range(4), num_workers=workers))  # they live to the end
            for _ in range(2):
                engine.train_batch(data)
            assert next(loader) == 0
    assert_close(models[1], models[0])


@pytest.mark.parametrize("pinned", [False, True])
def test_what_was_uploaded_may_be_written_at_once(pinned: bool) -> None:
    device = CudaDevice(0)
    host = device.host_empty(2**20, torch.float32) if pinned else torch.empty(2**20)
    host.fill_(1.0)
    torch.cuda._sleep(50_000_000)
    there = device.upload(host)
    host.fill_(2.0)
    assert there.eq(1.0).all()
    device.host_free(host)


class Headless(Model):
    """A model that writes into what it is given, and leaves the loss to the loop."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids.add_(1).remainder_(512))
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.head(hidden)
        return result


NVME = {"device": "nvme", "nvme_path": gettempdir()}
DISKS = {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # of harmony, of the top, of both sides
    "joined calls": ({"micro_batch": {"forward": 8, "backward": 4}}, {}, {}),
    "an optimizer on the device": ({"residency": 2}, {}, {}),
    "split masters": ({"split_masters": True}, {}, {"bf16": {"enabled": True}}),
    "weights and state on a disk": ({}, {"zero_optimization": DISKS}, {}),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings_train_a_loops_own_loss_of_batches_on_the_device_as_without_them(setting: Any) -> None:
    harmony, top, both = setting
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-3}}}
    models = [Headless(width=256, layers=6, words=512, dropout=0.0).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, more, others, place in zip(models, ({}, harmony), ({}, top), ("cpu", "cuda"), strict=True):
        given = config(**{"pack_layers": 1, "residency": "off", **more}) | adam | both | others
        with engine_for(model, None, given) as engine:
            for batch in itertools.islice(ids(), STEPS * GROUP):
                logits = engine(batch["ids"].to(place))
                labels = batch["ids"][:, 1:].flatten().cuda()
                engine.backward(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels))
                engine.step()
            engine.finish_updates()
            assert engine.swap_report().ratio <= 1.0
    assert_close(models[1], models[0], 1e-3)


class Recurrent(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(128, hidden))
        self.blocks = nn.ModuleList(nn.LSTM(hidden, hidden, batch_first=True) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = inputs + self.pos[: inputs.shape[1]]
        for block in self.blocks:
            hidden = hidden + block(hidden)[0]
        return {"loss": hidden.square().mean()}


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("residency", ["off", 2])
def test_recurrent_layers_train_and_hold_no_evicted_memory(residency: Any) -> None:
    """cuDNN moves weights into one buffer where it may: a resident pack would then be stepped beside what computes."""
    weights = []
    generator = torch.Generator().manual_seed(1)
    groups = [[{"inputs": torch.randn(2, 16, 64, generator=generator)} for _ in range(GROUP)] for _ in range(STEPS)]
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        weights.append(Recurrent())
        settings = config(pack_layers=1, residency=residency)
        settings["harmony"]["device"] = device
        with engine_for(weights[-1], fast_sgd, settings) as engine:
            for group in groups:
                engine.train_batch(iter(group))
            engine.finish_updates()
            if device == "cuda" and residency == "off":
                assert torch.cuda.memory_allocated() <= engine.memory_report().beside_bytes
    assert_close(weights[1], weights[0], 1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_the_models_code_sees_the_engines_device_as_the_current_one() -> None:
    model = llama()
    seen: set[int] = set()
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.add(torch.cuda.current_device()))
    settings = config(pack_layers=1, stash="host")
    settings["harmony"]["device"] = "cuda:1"
    with engine_for(model, fast_sgd, settings) as engine:
        data = batches()
        for _ in range(2):
            engine.train_batch(data)
        engine.eval_batch(data)
    assert seen == {1}
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == 0


def test_layers_on_a_stream_of_the_models_own_are_ordered_on_cuda() -> None:
    device, side = CudaDevice(), torch.cuda.Stream()
    own = torch.cuda.current_stream()

    def beside(model: nn.Module) -> Any:
        with torch.cuda.stream(side):
            slow = torch.ones(4096, 4096, device="cuda")
            for _ in range(20):
                slow = slow @ slow / 4096
            result = model[0](slow) + slow
        torch.cuda.current_stream().wait_stream(side)
        return result

    with model_and_lane(beside, device=device) as lane:
        lane.resume()
        assert lane.request is not None and torch.cuda.current_stream() == own
        lane.resume(lane.request.args[0] * 2)  # read behind the model's stream, and read there behind this one
        assert torch.cuda.current_stream() == own
        assert torch.equal(lane.result.cpu(), torch.full((4096, 4096), 3.0))
