"""Engines that are made, ended and saved, and wrappers of torch around them."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import ALL, ONE, PAIRS, REGROUPED, Found, Tolerance, case
from tests.exactness.models import (
    CLASSES,
    WIDTH,
    Block,
    Net,
    adamw,
    batches,
    by_both_loops,
    changed_between_steps,
    seen_after_steps,
    sgd,
    slow,
    train,
    trained,
    weights,
)
from tests.exactness.sides import Setting, Side, Stay

# ---- plans


def wide() -> Net:
    model = Net(lambda: Block(24), depth=8)
    model.front, model.head = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)
    return model


@case(Setting(1, 1.0), pack_layers=None, device_memory_gib=26_000 / 2**30)
def larger_groups_later(side: Side) -> Found:
    """Groups of one micro-batch, then of eight: a new plan with other packs, while slow updates are under way."""
    model = wide()
    engine = side.initialize(model, slow(model))
    for size in (1, 8, 2, 9):
        for i, (x, y) in enumerate(batches(size, seed=size)):
            engine.set_gradient_accumulation_boundary(i == size - 1)
            engine.backward(engine(x, labels=y))
            engine.step()
    return weights(model)


@case(Setting(2, 1.0), Setting(2, 0.0), pack_layers=None, device_memory_gib=60_000 / 2**30)
def larger_micro_batches_later(side: Side) -> Found:
    """Micro-batches of 2 rows, then of 40: measured anew, with other packs, while slow updates are under way."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        rows = (2, 40, 3, 60)[engine.micro_steps // 2]
        return engine(x[:rows], labels[:rows])

    return trained(side, wide(), slow, loss, steps=4, rows=60)


@case(pack_layers=None)
def packs_by_the_search(side: Side) -> Found:
    """Dropout and clipping with packs as the search finds them, by both loops."""
    return by_both_loops(side, Net(lambda: Block(dropout=0.2), depth=6), adamw)


@case(stash="host")
def stash_on_the_host(side: Side) -> Found:
    """Stashed inputs wait on the host, losses looked at for every second micro-batch."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        loss = engine(x, labels)
        if engine.micro_steps % 2:
            loss.item()
        return loss

    return trained(side, Net(lambda: Block(dropout=0.2), depth=4), adamw, loss, steps=3)


@case(Setting(2, 0.0), Setting(2, 1.0, Stay.RESIDENT))
def pretrained_model_saved_within_a_group(side: Side) -> Found:
    """`model.save_pretrained(folder)` of a tiny Llama within a group; it writes into its config."""

    def save(model: Any) -> None:
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)

    return used_within_a_group(side, save)


@case(Setting(2, 0.0), Setting(2, 1.0, Stay.RESIDENT))
def hidden_states_asked_for_within_a_group(side: Side) -> Found:
    """`engine.module(..., output_hidden_states=True)` of a tiny Llama within a group, for the first time: it sets hooks."""

    @torch.no_grad()
    def look(model: Any) -> None:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True)

    return used_within_a_group(side, look)


def used_within_a_group(side: Side, use: Callable[[nn.Module], None]) -> Found:
    """Steps of a tiny Llama, which `use` gets while a micro-batch waits."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        loss = of_tokens(engine, x, labels)
        if engine.micro_steps == 2:
            use(engine.module)
        return loss

    return trained(side, llama(), sgd, loss)


@case(Setting(2, 0.0), Setting(2, 1.0, Stay.RESIDENT))
def prefix_tuning(side: Side) -> Found:
    """PEFT's prefix tuning of a tiny Llama: every layer is handed a cache that holds a trained prefix."""
    from peft import PrefixTuningConfig

    return adapted(side, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


@case(Setting(2, 0.0), Setting(2, 1.0, Stay.GRAPHS))
def adapters_of_parameters(side: Side) -> Found:
    """PEFT's LoRA of parameters (`target_parameters`) of a tiny Llama: each call takes a weight out and puts it back."""
    from peft import LoraConfig

    return adapted(side, LoraConfig(target_modules=[], target_parameters=["q_proj.weight"], r=2))


def adapted(side: Side, config: Any) -> Found:
    from peft import get_peft_model

    model = get_peft_model(llama(), config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return trained(side, model, lambda _: optimizer, of_tokens)


@case(Setting(2, 0.0), Setting(2, 1.0, Stay.RESIDENT))
def adapters_disabled_for_a_reference(side: Side) -> Found:
    """DPO's loss of a tiny Llama with PEFT's LoRA: `with model.disable_adapter():` after the policy, for the reference."""
    from peft import LoraConfig, TaskType, get_peft_model

    model: Any = get_peft_model(llama(), LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=["q_proj"], r=2))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        policy = of_tokens(engine, x, labels)
        with torch.no_grad(), model.disable_adapter():
            reference = of_tokens(engine, x, labels)
        return -F.logsigmoid(reference - policy)

    return trained(side, model, lambda _: optimizer, loss)


@case(Setting(2, 0.0), Setting(2, 1.0, Stay.GRAPHS), tolerance=REGROUPED)
def hidden_states_of_a_layer_within_a_layer(side: Side) -> Found:
    """The loss of a tiny ALBERT, which calls one layer three times, is made of its hidden states: hooks count them."""
    from transformers import AlbertConfig, AlbertModel

    shape = {"hidden_size": 16, "embedding_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = AlbertModel(AlbertConfig(vocab_size=CLASSES, intermediate_size=32, **shape), add_pooling_layer=False)
    group = model.encoder.albert_layer_groups[0]
    group.albert_layers[0].attention.key.bias.requires_grad_(False)  # its gradient is nothing but rounding

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        ids = (labels[:, None] + torch.arange(8)) % CLASSES
        states = engine(input_ids=ids, output_hidden_states=True).hidden_states
        return torch.stack([len(states) * one.cos().mean() for one in states]).sum()

    return trained(side, model, sgd, loss)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=CLASSES, **shape))


def of_tokens(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The loss of a causal language model, over tokens made of a micro-batch's labels."""
    ids = (labels[:, None] + torch.arange(8)) % CLASSES
    return engine(input_ids=ids, labels=ids).loss


# ---- engines that end, and others that begin


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches(3):
        model(x, labels=y).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(*PAIRS)
def engine_deleted_and_made_again(side: Side) -> Found:
    """`del engine`, and the model is initialized again with a new optimizer; no thread of an engine outlives it."""
    model = Net()
    before = threading.active_count()
    for step in range(2):
        engine = side.initialize(model, adamw(model))
        train(engine, batches(2 * side.accumulation, seed=step))
        del engine
        gc.collect()
    return {**weights(model), "threads": threading.active_count() - before}


@case(*PAIRS)
def plain_training_after_destroy(side: Side) -> Found:
    """After engine.destroy() the model is trained on in plain PyTorch."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    train(engine, batches(2 * side.accumulation))
    engine.destroy()
    train_plainly(model, adamw(model))
    return weights(model)


@case(*PAIRS)
def training_before_initialize(side: Side) -> Found:
    """The model and the optimizer take some plain steps before initialize, and keep the optimizer's state."""
    model = Net()
    optimizer = adamw(model)
    train_plainly(model, optimizer)
    return trained(side, model, lambda _: optimizer)


@case(*ONE)
def gradients_left_before_initialize(side: Side) -> Found:
    """A plain backward before initialize leaves gradients, which count in the first step."""
    model = Net()
    model(*batches(1)[0]).backward()
    return trained(side, model, sgd)


# ---- saved


@case(*ALL)
def state_dicts_saved(side: Side) -> Found:
    """torch.save of model.state_dict() and optimizer.state_dict() between two steps, loaded into new ones."""
    model = Net()
    optimizer = adamw(model)
    engine = side.initialize(model, optimizer)
    train(engine, batches(2 * side.accumulation))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(engine, batches(side.accumulation, seed=2))
    file.seek(0)
    state = torch.load(file)
    other = Net()
    other_optimizer = adamw(other)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    other(*batches(1)[0]).backward()
    other_optimizer.step()
    return {**weights(model), **weights(other, "other ")}


# ---- asked


@case(*ALL, tolerance=Tolerance(1e-6, "norms are summed layer by layer"))
def norm_of_gradients_asked(side: Side) -> Found:
    """engine.get_global_grad_norm() after each step."""

    def look(engine: Any) -> Tensor:
        return torch.tensor(engine.get_global_grad_norm() if side.clipping else 0.0)

    return seen_after_steps(side, Net(), look, sgd)


@case(*PAIRS)
def weights_through_the_engine(side: Side) -> Found:
    """engine.parameters(), engine.named_parameters() and engine.state_dict() are read after each step."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    found: dict[str, Any] = {}
    for step in range(2):
        train(engine, batches(side.accumulation, seed=step))
        found |= {f"{n.removeprefix('module.')} {step}": p.detach().clone() for n, p in engine.named_parameters()}
        found |= {f"state {n.removeprefix('module.')} {step}": t.clone() for n, t in engine.state_dict().items()}
        found[f"sum {step}"] = torch.stack([p.detach().sum() for p in engine.parameters()]).sum()
    return found


@case(*PAIRS)
def model_moved(side: Side) -> Found:
    """`model.float()`, `model.cpu()` and `model.to("cpu", torch.float32)` between two steps."""
    model = Net()
    return changed_between_steps(side, model, lambda: model.float().cpu().to("cpu", torch.float32), steps=2)


@case(*PAIRS)
def loop_in_a_thread(side: Side) -> Found:
    """The engine is made in one thread, and the loop runs in another."""
    model = Net(lambda: Block(dropout=0.2))
    engine = side.initialize(model, adamw(model))
    thread = threading.Thread(target=lambda: train(engine, batches(2 * side.accumulation)))
    thread.start()
    thread.join()
    return weights(model)


# ---- what of torch is around


@case(*PAIRS)
def anomaly_detection(side: Side) -> Found:
    """The loop runs under torch.autograd.set_detect_anomaly(True)."""
    with torch.autograd.set_detect_anomaly(True):
        return trained(side, Net())


@case(*PAIRS)
def saved_tensors_on_cpu(side: Side) -> Found:
    """Forwards run under torch.autograd.graph.save_on_cpu()."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return engine(x, labels)

    return trained(side, Net(), adamw, loss)


@case(*PAIRS)
def global_forward_hook(side: Side) -> Found:
    """torch.nn.modules.module.register_module_forward_hook halves the outputs of every Linear."""
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 0.5 if isinstance(module, nn.Linear) else None
    )
    try:
        return trained(side, Net(), sgd)
    finally:
        handle.remove()
