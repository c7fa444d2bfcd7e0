"""An engine ends with its last reference or with destroy(), and copies of what it trains are plain."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import harmony_ds
from harmony_ds import ConfigError, HarmonyEngine, ModelError, UnsupportedError, UsageError
from harmony_ds.device import CpuDevice
from harmony_ds.offload.disk import DiskFile
from tests.cover import spread
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, loop, plainly, train_groups, weights_of
from tests.families import VOCABULARY
from tests.inside import assembly_of, updater_of
from tests.oracle import assert_same

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 2)
CONFIG = config_of(2, 0.5, {"pack_layers": 1, "residency": 1})


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Only reference counts free anything; of what other tests left since the last freeze, nothing is there any more."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def initialized(model: nn.Module, **arguments: Any) -> HarmonyEngine:
    return harmony_ds.initialize(model=model, optimizer=adamw(model.parameters()), config=CONFIG, **arguments)[0]


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Threads that run already are no concern of a test (transformers keeps trainers, and so their engines)."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def update_threads() -> int:
    return sum(thread.name == "harmony-update" for thread in {*threading.enumerate()} - OTHERS)


def join_ends() -> None:
    """Wait for the threads that end engines."""
    for thread in threading.enumerate():
        if thread.name == "harmony-destroy":
            thread.join(60)


def assert_plain(model: nn.Module) -> None:
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert type(module.__dict__["_parameters"]) is dict
        assert not module._load_state_dict_post_hooks
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert not parameter.__dict__


def looked(engine: HarmonyEngine) -> None:
    with pytest.warns(RuntimeWarning, match="looked at before"):
        loop(engine, GROUPS[:1], lambda i: i == 0)


USES: dict[str, Callable[[HarmonyEngine], object]] = {
    "nothing": lambda engine: None,
    "train_batch": lambda engine: engine.train_batch(iter(GROUPS[0])),
    "looked-at losses": looked,
    "evaluation": lambda engine: engine.eval_batch(iter(GROUPS[0])),
    "a queued micro-batch": lambda engine: engine.backward(engine(**GROUPS[0][0]).loss),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.usefixtures("no_collections")
def test_a_dropped_engine_leaves_neither_threads_nor_device_memory(use: str) -> None:
    model, device, threads = LLAMA.build(0.1), CpuDevice(), update_threads()
    engine = initialized(model, device=device)
    USES[use](engine)
    reference = weakref.ref(engine)
    assert update_threads() == threads + 1
    del engine

    assert reference() is None
    assert update_threads() == threads
    assert device.allocated_bytes() == 0
    assert_plain(model)


@pytest.mark.usefixtures("no_collections")
def test_a_dropped_engine_frees_the_host_memory_of_its_optimizer() -> None:
    model = LLAMA.build(0.1)
    engine, optimizer, *_ = harmony_ds.initialize(model=model, optimizer=adamw(model.parameters()), config=CONFIG)
    train_groups(engine, GROUPS[:1])
    moment = weakref.ref(optimizer.state[model.lm_head.weight]["exp_avg"])
    del engine, optimizer
    gc.collect()  # torch's optimizers are cycles

    assert moment() is None


@pytest.mark.usefixtures("no_collections")
def test_an_engine_that_waits_for_garbage_collection_does_not_hold_its_model() -> None:
    model = LLAMA.build(0.1)
    engine = initialized(model)
    engine.itself = engine
    reference = weakref.ref(engine)
    del engine
    assert reference() is not None
    with engine_for(model, adamw, CONFIG) as again:
        garbage = reference()
        assert garbage is None or not garbage.usable
        train_groups(again, GROUPS[:1])


def test_an_engine_keeps_a_model_whose_micro_batches_wait_or_that_is_part_of_its_own() -> None:
    plain, _ = plainly(LLAMA, 0.1, GROUPS[:2], adamw, 0.5)
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, CONFIG) as engine:
        train_groups(engine, GROUPS[:1])
        with pytest.raises(ModelError, match="belongs to another engine"):
            initialized(model.model)
        for batch in GROUPS[1]:
            engine.backward(engine(**batch).loss)
            with pytest.raises(ModelError, match="belongs to another engine, in which micro-batches or gradients wait"):
                initialized(model)
            engine.step()
    assert_same(model, plain, bitwise=True)


def test_an_engine_takes_a_model_over_from_an_idle_one_which_says_so_when_it_is_used() -> None:
    plain, _ = plainly(LLAMA, 0.0, GROUPS[:2], adamw, 0.5)
    model = LLAMA.build(0.0)
    optimizer = adamw(list(model.parameters()))
    first, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=CONFIG)
    train_groups(first, GROUPS[:1])
    with pytest.raises(ConfigError):
        harmony_ds.initialize(model=model, optimizer=optimizer, config={**CONFIG, "gradient_clipping": -1})
    assert first.usable
    second, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=CONFIG)
    try:
        for use in (lambda: first(**GROUPS[1][0]), first.step, lambda: first.save_checkpoint("nowhere")):
            with pytest.raises(UsageError, match="a later engine has taken this engine's model over"):
                use()
        first.destroy()
        train_groups(second, GROUPS[1:2])
    finally:
        second.destroy()
    assert_same(model, plain, bitwise=True)


@pytest.mark.usefixtures("no_collections")
def test_a_loss_that_outlives_its_engine_says_so() -> None:
    engine = initialized(LLAMA.build(0.1))
    loss = engine(**GROUPS[0][0]).loss
    device = weakref.ref(assembly_of(engine).device)
    del engine

    assert update_threads() == 0
    with pytest.raises(UsageError, match="has been destroyed"):
        loss.item()
    del loss
    gc.collect()
    assert device() is None


def test_an_engine_that_is_collected_inside_its_updater_does_not_wait_for_itself() -> None:
    model = LLAMA.build(0.1)
    engine = initialized(model)
    train_groups(engine, GROUPS[:1])
    updater = updater_of(engine)
    with updater._changed:
        del engine
    join_ends()
    assert update_threads() == 0
    assert_plain(model)


@pytest.mark.usefixtures("no_collections")
def test_an_engine_that_is_collected_on_a_disk_thread_does_not_wait_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The update thread waits for what disk threads read."""
    kept: list[HarmonyEngine] = []
    dropped = threading.Event()
    read = DiskFile.read

    def read_and_collect(self: DiskFile, source: torch.Tensor, values: torch.Tensor) -> None:
        if threading.current_thread().name.startswith("harmony-disk-read"):
            assert dropped.wait(60)
            kept.clear()
        read(self, source, values)

    monkeypatch.setattr(DiskFile, "read", read_and_collect)
    nvme = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    model = LLAMA.build(0.1)
    kept += harmony_ds.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config_of(2, 0.5, bf16={"enabled": True}, **nvme)
    )[:1]
    train_groups(kept[0], GROUPS[:1])
    thread = updater_of(kept[0])._thread
    dropped.set()
    thread.join(60)
    assert not thread.is_alive()
    join_ends()
    assert_plain(model)


@pytest.mark.usefixtures("no_collections")
def test_weights_of_an_engine_that_is_collected_in_an_update_are_read_when_that_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[HarmonyEngine] = []
    begun, stepping, collected, waited = (threading.Event() for _ in range(4))

    class Collecting(torch.optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> None:
            if threading.current_thread().name == "harmony-update" and begun.is_set():
                assert stepping.wait(60)
                kept.clear()
                collected.set()
                assert waited.wait(60)
            super().step(closure)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name == "harmony-destroy":
            waited.set()
        whole(self, timeout)

    whole = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", join)
    model = LLAMA.build(0.1)
    before = model.lm_head.weight.detach().clone()
    optimizer = Collecting(model.parameters(), lr=0.1)
    kept += harmony_ds.initialize(model=model, optimizer=optimizer, config=config_of(2, 0.5))[:1]
    begun.set()
    train_groups(kept[0], GROUPS[:1])
    stepping.set()
    assert collected.wait(60)
    try:
        seen = model.lm_head.weight.detach().clone()
    finally:
        waited.set()
    join_ends()
    assert_plain(model)
    assert torch.equal(seen, model.lm_head.weight)
    assert not torch.equal(seen, before)


CALLS: dict[str, Callable[[HarmonyEngine, Path], object]] = {
    "forward": lambda engine, folder: engine(**GROUPS[0][0]),
    "backward": lambda engine, folder: engine.backward(torch.ones((), requires_grad=True)),
    "step": lambda engine, folder: engine.step(),
    "scale": lambda engine, folder: engine.scale(torch.ones(())),
    "train_batch": lambda engine, folder: engine.train_batch(iter(GROUPS[0])),
    "train_group": lambda engine, folder: engine.train_group(GROUPS[0], lambda batch: engine.module(**batch).loss),
    "eval_batch": lambda engine, folder: engine.eval_batch(iter(GROUPS[0])),
    "no_grad": lambda engine, folder: torch.no_grad()(engine)(**GROUPS[0][0]),
    "generate": lambda engine, folder: engine.generate(GROUPS[0][0]["input_ids"]),
    "streaming": lambda engine, folder: engine.streaming().__enter__(),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder / "new"),
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder / "new"),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder / "old"),
    "load_module_state_dict": lambda engine, folder: engine.load_module_state_dict(
        {"module": weights_of(engine.module)}
    ),
    "load_module_state_dict by hand": lambda engine, folder: engine.load_module_state_dict(
        {"module": {}}, custom_load_fn=lambda src, dst: nn.init.zeros_(dst.lm_head.weight)
    ),
    "zero_grad": lambda engine, folder: engine.zero_grad(),
    "no_sync": lambda engine, folder: engine.no_sync(),
    "set_train_batch_size": lambda engine, folder: engine.set_train_batch_size(8),
    "set_train_micro_batch_size": lambda engine, folder: engine.set_train_micro_batch_size(4),
    "set_gradient_accumulation_boundary": lambda engine, folder: engine.set_gradient_accumulation_boundary(True),
    "compile": lambda engine, folder: engine.compile(backend="eager"),
    "offload_states": lambda engine, folder: engine.offload_states(),
    "reload_states": lambda engine, folder: engine.reload_states(),
    "empty_partition_cache": lambda engine, folder: engine.empty_partition_cache(),
    "record_steps": lambda engine, folder: engine.record_steps(),
    "on_progress": lambda engine, folder: engine.on_progress(None),
}


@pytest.fixture(scope="module")
def destroyed(tmp_path_factory: pytest.TempPathFactory) -> tuple[HarmonyEngine, nn.Module, Path]:
    """An engine after one step, its model, and the folder of its checkpoint. Nobody can change any of them."""
    folder, model = tmp_path_factory.mktemp("destroyed"), LLAMA.build(0.1)
    with engine_for(model, adamw, CONFIG) as engine:
        train_groups(engine, GROUPS[:1])
        engine.save_checkpoint(folder / "old")
    engine.destroy()  # a second time
    return engine, model, folder


@pytest.mark.parametrize("call", CALLS)
def test_after_destroy_every_call_is_refused_by_name(
    call: str, destroyed: tuple[HarmonyEngine, nn.Module, Path]
) -> None:
    engine, model, folder = destroyed
    before, mode = weights_of(model), model.training

    with pytest.raises(UsageError, match="this engine has been destroyed"):
        CALLS[call](engine, folder)
    assert not engine.usable
    assert model.training is mode
    assert engine.global_steps == 1
    assert not (folder / "new").exists()
    assert_same(model, before, bitwise=True)
    assert_plain(model)


@pytest.mark.parametrize("run", [None, 0, 1], ids=["after a step", "queued", "run already"])
def test_destroy_says_how_many_micro_batches_have_unused_gradients(
    run: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = LLAMA.build(0.0)
    engine = initialized(model)
    train_groups(engine, GROUPS[:1])
    if run:
        engine.backward(engine(**GROUPS[1][0]).loss)
        assert model.lm_head.weight.grad is not None
    if run is not None:
        engine.backward(engine(**GROUPS[1][1]).loss)
    unused = engine(**GROUPS[1][0])
    engine.destroy()
    engine.destroy()

    said = [record.getMessage() for record in caplog.records if record.name == "harmony_ds"]
    assert len(said) == (run is not None)
    assert run is None or f"the gradients of micro-batches ({1 + run}) whose step was not taken" in said[0]
    del unused


@pytest.mark.parametrize("end", ["destroy", "del"])
def test_an_update_that_fails_unseen_surfaces_at_the_end(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> None:
            if threading.current_thread().name == "harmony-update":
                over.wait(60)
                raise OSError("the update failed")

    over = threading.Event()
    unraisable: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: unraisable.append(seen.exc_value))
    model = LLAMA.build(0.1)
    engine, *_ = harmony_ds.initialize(
        model=model, optimizer=Broken(model.parameters(), lr=0.1), config=config_of(2, 0.5)
    )
    train_groups(engine, GROUPS[:1])
    over.set()
    if end == "destroy":
        with pytest.raises(OSError, match="the update failed"):
            engine.destroy()
        engine.destroy()
    else:
        del engine
        assert [str(seen) for seen in unraisable] == ["the update failed"]
    assert_plain(model)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: torch.load(io.BytesIO(saved(value)), weights_only=False),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_an_engine_is_refused(way: str) -> None:
    with (
        engine_for(LLAMA.build(0.0), adamw, CONFIG) as engine,
        pytest.raises(UnsupportedError, match="cannot be copied or pickled"),
    ):
        COPIES[way](engine)


def assert_plain_copy(model: nn.Module) -> None:
    """Layers may have their own class's forward among their attributes."""
    for module in model.modules():
        forward = module.__dict__.pop("forward", None)
        assert forward in (None, module.forward)
    assert_plain(model)


@pytest.mark.parametrize(("way", "clip"), spread(list(COPIES), [None, 0.5]))
def test_a_copy_of_a_model_in_training_is_plain_and_true(way: str, clip: float | None) -> None:
    plain, _ = plainly(LLAMA, 0.0, GROUPS[:1], adamw, clip)
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(2, clip, CONFIG["harmony"])) as engine:
        train_groups(engine, GROUPS[:1])
        clone = COPIES[way](engine.module)
        layer = COPIES[way](model.model.layers[0])
        assert_plain_copy(layer)
        assert_same(clone, plain, bitwise=True)
        assert torch.equal(clone(**GROUPS[1][0]).loss, plain(**GROUPS[1][0]).loss)
        train_groups(engine, GROUPS[1:2])
    with engine_for(clone, adamw, CONFIG) as other:  # and can be trained itself
        train_groups(other, GROUPS[:1])
    assert_plain_copy(clone)
    assert_same(layer, plain.model.layers[0], bitwise=True)


def test_copies_keep_attributes_of_their_user() -> None:
    class Tagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 2)
            self.tied = nn.Linear(2, 2)
            self.tied.weight = self.line.weight
            self.line.weight.tag = "mine"
            self.line.forward = torch.nn.functional.relu
            self.register_load_state_dict_post_hook(print)

        def __getstate__(self) -> dict[str, Any]:
            return {**self.__dict__, "saved": True}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tied(self.line(x)).sum()

    sys.modules[__name__].Tagged = Tagged  # pickled by name
    Tagged.__qualname__ = "Tagged"
    model = Tagged()
    with engine_for(model, adamw, CONFIG):
        clone = pickle.loads(pickle.dumps(model))
        assert clone.saved
        assert clone.line.forward is torch.nn.functional.relu
        assert list(clone._load_state_dict_post_hooks.values()) == [print]
        assert clone.line.weight is clone.tied.weight
        assert clone.line.weight.__dict__ == {"tag": "mine"}
    assert model.line.forward is torch.nn.functional.relu


LEAVE = """

import harmony_ds
from tests.engine.test_lifetime import CONFIG, GROUPS, LLAMA, adamw
model = LLAMA.build(0.0)
engine, *_ = harmony_ds.initialize(model=model, optimizer=adamw(model.parameters()), config=CONFIG)
for group in GROUPS:
    engine.train_batch(iter(group))
"""


def test_a_process_leaves_in_peace_without_destroy() -> None:
    run = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, check=False)

    assert (run.returncode, "Traceback" in run.stderr) == (0, False), run.stderr[-2000:]


READ_WITHOUT_HARMONY = """
import sys, torch
sys.modules["harmony_ds"] = None  # importing it is an error
model = torch.load(sys.argv[1], weights_only=False)
weights = torch.load(sys.argv[2], weights_only=True)
optimizer = torch.load(sys.argv[3], weights_only=False)
assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
model(**torch.load(sys.argv[4])).loss.backward()
assert len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups)
optimizer.step()
"""


def test_a_process_without_harmony_ds_reads_a_saved_model(tmp_path: Path) -> None:
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, CONFIG) as engine:
        train_groups(engine, GROUPS[:1])
        content = (engine.module, engine.module.state_dict(), engine.optimizer, dict(GROUPS[1][0]))
        files = [str(tmp_path / name) for name in ("model", "weights", "optimizer", "batch")]
        for value, file in zip(content, files, strict=True):
            torch.save(value, file)
    command = [sys.executable, "-c", READ_WITHOUT_HARMONY, *files]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr[-2000:]


def tokens_alive() -> int:
    """The number of batches of tokens that there are."""
    return sum(type(o) is torch.Tensor and o.dtype == torch.int64 and o.dim() == 2 for o in gc.get_objects())


def logits_alive() -> int:
    return sum(type(o) is torch.Tensor and o.shape[-1:] == (VOCABULARY,) and o.dim() == 3 for o in gc.get_objects())


def test_a_loss_that_is_kept_does_not_keep_its_inputs(no_collections: None) -> None:
    with engine_for(LLAMA.build(0.0), adamw, CONFIG) as engine:
        before = tokens_alive()
        losses = []
        for index in range(4):
            losses.append(engine(**LLAMA.batch(index)).loss)
            engine.backward(losses[-1])
            engine.step()
        assert tokens_alive() == before
        assert all(loss.item() > 0 for loss in losses)


def test_losses_of_tokens_that_are_kept_do_not_keep_logits(no_collections: None) -> None:
    batch, kept = LLAMA.batch(0), []
    with engine_for(LLAMA.build(0.0), adamw, CONFIG) as engine:
        before = logits_alive()
        for _ in range(4):
            losses = F.cross_entropy(engine(**batch).logits.mT, batch["labels"], reduction="none")
            engine.backward(losses.mean())
            kept.append(losses.detach())
            del losses
            engine.step()
        assert logits_alive() == before
        assert all(one.sum() > 0 for one in kept)


def test_logits_of_a_micro_batch_are_gone_before_the_next_one_runs(no_collections: None) -> None:
    with engine_for(LLAMA.build(0.0), adamw, config_of(4)) as engine:
        before, seen = logits_alive(), []
        engine.on_progress(lambda *_: seen.append(logits_alive()))
        engine.train_batch(LLAMA.batch(index) for index in range(4))
        assert set(seen) == {before}
