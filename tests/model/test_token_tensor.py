"""What a program makes of a head's output equals what it makes of a plain tensor; losses never hold all of its tokens."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds.device import CpuDevice
from harmony_ds.device.live_bytes import LiveBytes
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.model.token_expression import HeadCall
from harmony_ds.model.token_tensor import TokenTensor

ROWS, LENGTH, HIDDEN, VOCABULARY = 2, 12, 8, 64
TILE = 5
Program = Callable[[Tensor, "Data"], Tensor]


class Data:
    """Tensors beside the logits, the same at every call."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        self.labels[0, :3] = -100
        self.mask = torch.rand(ROWS, LENGTH, generator=generator) > 0.3
        self.teacher = torch.randn(ROWS, LENGTH, VOCABULARY, generator=generator)
        self.advantages = torch.randn(ROWS, 1, generator=generator)
        self.class_weights = torch.rand(VOCABULARY, generator=generator) + 0.5
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.bias = nn.Parameter(torch.randn(VOCABULARY, generator=generator))


def head_of(module: nn.Module, hidden: Tensor, tile: int = TILE, gather: Callable[[], None] = lambda: None) -> HeadCall:
    return HeadCall(hidden, lambda part, weights: module(part), tile, nullcontext, gather, CpuDevice().parts_to_run)


def hidden_states() -> Tensor:
    return torch.randn(ROWS, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_()


def linear() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Linear(HIDDEN, VOCABULARY)


# ---- programs: from logits to a loss


def transformers_loss(logits: Tensor, data: Data) -> Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, data.labels, VOCABULARY)


def transformers_loss_of_many(logits: Tensor, data: Data) -> Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, data.labels, VOCABULARY, num_items_in_batch=torch.tensor(31))


def shifted(logits: Tensor, data: Data) -> Tensor:
    logits, labels = logits[..., :-1, :].contiguous(), data.labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def smoothed_and_weighted(logits: Tensor, data: Data) -> Tensor:
    flat, labels = logits.flatten(0, 1), data.labels.flatten()
    return F.cross_entropy(flat, labels, weight=data.class_weights, label_smoothing=0.1)


def classes_in_dimension_1(logits: Tensor, data: Data) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), data.labels) + F.cross_entropy(logits.permute(0, 2, 1), data.labels)


def losses_of_tokens(logits: Tensor, data: Data) -> Tensor:
    losses = F.cross_entropy(logits.reshape(-1, VOCABULARY), data.labels.reshape(-1), reduction="none")
    return (losses.view(ROWS, LENGTH) * data.mask).sum() / data.mask.sum()


def probabilities_as_targets(logits: Tensor, data: Data) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), data.teacher.softmax(-1).view(-1, VOCABULARY))


def soft_cap(logits: Tensor, data: Data) -> Tensor:
    return transformers_loss(torch.tanh(logits / 30.0) * 30.0, data)


def scaled_by_parameters(logits: Tensor, data: Data) -> Tensor:
    return transformers_loss(logits / data.temperature + data.bias, data)


def log_probabilities_of_labels(logits: Tensor, data: Data) -> Tensor:
    labels = data.labels[:, 1:].clamp(min=0)
    log_probabilities = logits[:, :-1].log_softmax(-1).gather(dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return -F.logsigmoid((log_probabilities * data.mask[:, 1:]).sum(-1)).mean()


def log_probabilities_by_logsumexp(logits: Tensor, data: Data) -> Tensor:
    labels, logits = data.labels[:, 1:].clamp(min=0), logits[:, :-1] / 0.7
    chosen = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(chosen - torch.logsumexp(logits, dim=-1))
    return -(torch.min(ratio * data.advantages, ratio.clamp(0.8, 1.2) * data.advantages) * data.mask[:, 1:]).sum()


def picked_by_indices(logits: Tensor, data: Data) -> Tensor:
    flat = F.log_softmax(logits.view(-1, VOCABULARY), dim=1)
    return -flat[torch.arange(ROWS * LENGTH), data.labels.clamp(min=0).view(-1)].mean()


def divergence_from_a_teacher(logits: Tensor, data: Data) -> Tensor:
    return F.kl_div(F.log_softmax(logits / 2, dim=-1), F.softmax(data.teacher / 2, dim=-1), reduction="batchmean")


def divergence_of_logs(logits: Tensor, data: Data) -> Tensor:
    student, teacher = logits.log_softmax(-1), data.teacher.log_softmax(-1)
    return F.kl_div(teacher, student, log_target=True, reduction="sum") + F.kl_div(
        student, teacher.exp(), reduction="sum"
    )


def divergence_by_hand(logits: Tensor, data: Data) -> Tensor:
    probabilities = data.teacher.softmax(-1)
    return (probabilities * (probabilities.log() - logits.log_softmax(-1))).sum(-1)[data.mask].mean()


def divergence_by_tokens(logits: Tensor, data: Data) -> Tensor:
    each = F.kl_div(logits.log_softmax(-1), data.teacher.softmax(-1), reduction="none")
    return (each.sum(-1) * data.mask).sum()


def entropy(logits: Tensor, data: Data) -> Tensor:
    probabilities = logits.softmax(-1)
    return -(probabilities * torch.log(probabilities + 1e-9)).sum(dim=-1).mean()


def squares(logits: Tensor, data: Data) -> Tensor:
    return F.mse_loss(logits, data.teacher) + 1e-4 * logits.logsumexp(-1).pow(2).mean() + logits.float().pow(2).mean()


def masked_tokens(logits: Tensor, data: Data) -> Tensor:
    return F.cross_entropy(logits[data.mask], data.labels.clamp(min=0)[data.mask])


def masked_values(logits: Tensor, data: Data) -> Tensor:
    logits = logits.masked_fill(torch.arange(VOCABULARY) > 50, -1e4)
    return F.cross_entropy(logits[:, -1], data.labels[:, -1].clamp(max=50))


def some_values(logits: Tensor, data: Data) -> Tensor:
    return F.cross_entropy(logits[..., :60].reshape(-1, 60), data.labels.clamp(0, 59).view(-1)) + logits[:, :, 7].mean()


def largest_values(logits: Tensor, data: Data) -> Tensor:
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    return (best - second).mean() + logits.max(dim=-1).values.sum() - logits.max(-1)[0].mean() + logits.std(-1).mean()


def negative_log_likelihood(logits: Tensor, data: Data) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.view(-1, VOCABULARY), dim=-1), data.labels.view(-1))


def without_gradient_for_targets(logits: Tensor, data: Data) -> Tensor:
    with torch.no_grad():
        targets = logits.softmax(-1)
    return -(targets * logits.log_softmax(-1)).sum(-1).mean() + (logits.detach().softmax(-1) * logits).sum(-1).mean()


def rows_one_by_one(logits: Tensor, data: Data) -> Tensor:
    losses = [F.cross_entropy(row, labels) for row, labels in zip(logits, data.labels, strict=True)]
    return torch.stack(losses).sum()


def margin_to_other_values(logits: Tensor, data: Data) -> Tensor:
    labels = data.labels.clamp(min=0)[..., None]
    others = logits.scatter(-1, labels, float("-inf")).amax(-1)
    masses = logits.softmax(-1).cumsum(dim=-1).gather(-1, labels)
    added = torch.scatter_add(logits, 2, labels, data.mask[..., None].float()).logsumexp(-1)
    return F.relu(1 + others - logits.gather(-1, labels)[..., 0]).mean() + masses.mean() + added.mean()


IN_TILES: list[Program] = [
    transformers_loss, transformers_loss_of_many, shifted, smoothed_and_weighted, classes_in_dimension_1,
    losses_of_tokens, probabilities_as_targets, soft_cap, scaled_by_parameters, log_probabilities_of_labels,
    log_probabilities_by_logsumexp, picked_by_indices, divergence_from_a_teacher, divergence_of_logs, divergence_by_hand,
    divergence_by_tokens, entropy, squares, masked_tokens, masked_values, some_values, largest_values,
    negative_log_likelihood, without_gradient_for_targets, rows_one_by_one, margin_to_other_values,
]  # fmt: skip


def sorted_values(logits: Tensor, data: Data) -> Tensor:
    return (logits.sort(-1).values * torch.arange(VOCABULARY)).sum()


def mean_over_tokens(logits: Tensor, data: Data) -> Tensor:
    return logits.mean(1).logsumexp(-1).sum()


def matrix_product(logits: Tensor, data: Data) -> Tensor:
    return (logits.softmax(-1) @ data.class_weights).sum()


def changed_in_place(logits: Tensor, data: Data) -> Tensor:
    view, twice = logits[:, 1:], logits * 2
    logits.div_(3.0)
    return F.cross_entropy(view.flatten(0, 1), data.labels[:, 1:].flatten()) + twice.logsumexp(-1).mean()


def set_in_place(logits: Tensor, data: Data) -> Tensor:
    logits[:, :, 5] = -3.0
    return F.cross_entropy(logits.flatten(0, 1), data.labels.flatten())


def a_view_changed_in_place(logits: Tensor, data: Data) -> Tensor:
    logits[:, :2].mul_(2.0)
    return F.cross_entropy(logits.flatten(0, 1), data.labels.flatten())


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, logits: Tensor) -> Tensor:
        return logits * 3

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 3


def a_function_of_the_programs_own(logits: Tensor, data: Data) -> Tensor:
    scaled: Tensor = _Scaled.apply(logits)
    return F.cross_entropy(scaled.flatten(0, 1), data.labels.flatten()) + logits.logsumexp(-1).mean()


def a_function_of_what_was_made_of_it(logits: Tensor, data: Data) -> Tensor:
    scaled: Tensor = _Scaled.apply((logits * data.temperature)[:, 1:])
    return F.cross_entropy(scaled.flatten(0, 1), data.labels[:, 1:].flatten())


def joined_with_another(logits: Tensor, data: Data) -> Tensor:
    return torch.cat([logits, data.teacher]).logsumexp(-1).sum()


WHOLE: list[Program] = [
    sorted_values, mean_over_tokens, matrix_product, changed_in_place, set_in_place, a_view_changed_in_place,
    a_function_of_the_programs_own, a_function_of_what_was_made_of_it, joined_with_another,
]  # fmt: skip


def run(program: Program, module: nn.Module, head: HeadCall | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and the gradients of hidden states, weights and what is beside them; `head`: in tiles."""
    data = Data()
    hidden = hidden_states() if head is None else head.hidden
    logits = module(hidden) if head is None else TokenTensor.of_head(head)
    assert logits is not None
    loss = program(logits, data)
    loss.backward()
    gradients = {name: own.grad for name, own in module.named_parameters()}
    gradients |= {"hidden": hidden.grad if head is None else None}
    gradients |= {"temperature": data.temperature.grad, "bias of values": data.bias.grad}
    return loss.detach(), {name: own for name, own in gradients.items() if own is not None}


def assert_same(program: Program) -> HeadCall:
    """Compare a program in tiles with the same on a plain tensor; return the head that was called."""
    module, hidden = linear(), hidden_states()
    head = head_of(module, hidden)
    loss, gradients = run(program, module, head)
    gradients["hidden"] = require(hidden.grad)
    expected, expected_gradients = run(program, linear())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    return head


def require(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def logits_of_tiles() -> TokenTensor:
    logits = TokenTensor.of_head(head_of(linear(), hidden_states()))
    assert logits is not None
    return logits


def name_of(program: Program) -> str:
    return program.__name__


@pytest.mark.parametrize("program", IN_TILES, ids=name_of)
def test_losses_in_tiles_equal_those_of_a_plain_tensor(program: Program) -> None:
    assert not assert_same(program).computed_whole_for


@pytest.mark.parametrize("program", WHOLE, ids=name_of)
def test_what_is_not_known_computes_it_whole(program: Program) -> None:
    assert assert_same(program).computed_whole_for


def test_a_loss_never_holds_the_values_of_all_tokens() -> None:
    hidden = torch.randn(1, 512, HIDDEN, requires_grad=True)
    module = nn.Linear(HIDDEN, 256)
    logits = TokenTensor.of_head(head_of(module, hidden, 16))
    assert logits is not None
    labels = torch.randint(0, 256, (1, 512))
    with LiveBytes() as probe:
        loss = F.cross_entropy(logits.float().view(-1, 256), labels.view(-1)) + logits.log_softmax(-1).amax(-1).mean()
        loss.backward()

    assert probe.peak_bytes() < 0.5 * 512 * 256 * 4


@pytest.mark.parametrize(("reductions", "kept"), [(1, 1), (2, 1)])
def test_backward_begins_with_the_tile_that_ran_last_whose_graph_is_kept(reductions: int, kept: int) -> None:
    """Of several reductions the last one's: no other graph is there while a tile runs."""
    module, runs = linear(), 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    module.register_forward_pre_hook(count)
    logits = TokenTensor.of_head(head_of(module, hidden_states()))
    assert logits is not None
    runs, tiles = 0, -(-ROWS * LENGTH // TILE)

    loss = torch.stack([logits.logsumexp(-1).sum() for _ in range(reductions)]).sum()
    assert runs == reductions * tiles
    loss.backward(retain_graph=True)
    assert runs == 2 * reductions * tiles - kept
    loss.backward()
    assert runs == 3 * reductions * tiles - kept


def test_no_graph_of_a_tile_outlives_a_loss_that_is_dropped_or_its_head() -> None:
    logits, of_tile = logits_of_tiles(), TILE * VOCABULARY * 4
    with LiveBytes() as probe:
        logits.logsumexp(-1)
        assert probe.allocated_bytes() < of_tile
        kept = logits.logsumexp(-1)
        assert probe.allocated_bytes() > of_tile
        logits.head.close()
        assert probe.allocated_bytes() < of_tile
        assert kept.shape == (ROWS, LENGTH)


def test_it_looks_like_the_tensor_that_it_stands_for() -> None:
    logits, plain = logits_of_tiles(), linear()(hidden_states())
    views = [lambda t: t, lambda t: t[:, 1:], lambda t: t.transpose(1, 2), lambda t: t[:, ::2].reshape(-1, VOCABULARY)]

    for view in views:
        one, other = view(logits), view(plain)
        assert (one.shape, one.stride(), one.dtype, one.device) == (
            other.shape,
            other.stride(),
            other.dtype,
            other.device,
        )
        assert one.is_contiguous() == other.is_contiguous()
        assert one.requires_grad and not one.is_leaf and isinstance(one, torch.Tensor)
        assert (len(one), one.numel(), one.dim()) == (len(other), other.numel(), other.dim())
    assert "not computed" in repr(logits)
    assert not logits.detach().requires_grad and logits.bfloat16().dtype is torch.bfloat16
    assert logits.to("cpu") is logits and logits.float() is logits and logits.contiguous() is logits


def test_errors_of_a_program_are_those_of_a_plain_tensor() -> None:
    logits = logits_of_tiles()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        logits[:, 1:].view(-1, VOCABULARY)
    with pytest.raises(IndexError):
        logits[:, LENGTH + 3]
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(logits.view(-1, VOCABULARY), torch.zeros(3, dtype=torch.long))


def test_it_is_saved_and_copied_as_a_plain_tensor() -> None:
    logits, plain = logits_of_tiles().detach(), linear()(hidden_states()).detach()
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)

    torch.testing.assert_close(torch.load(file), plain)
    torch.testing.assert_close(copy.deepcopy(logits_of_tiles().detach()), plain)
    assert logits.numpy().shape == plain.shape and logits.tolist() == plain.tolist()


def test_metrics_are_computed_in_tiles() -> None:
    logits, plain, labels = logits_of_tiles(), linear()(hidden_states()), Data().labels

    assert torch.equal(logits.argmax(-1), plain.argmax(-1))
    assert (logits.argmax(dim=-1) == labels).sum() == (plain.argmax(dim=-1) == labels).sum()
    assert torch.equal(logits.topk(3).indices, plain.topk(3).indices)
    assert not logits.head.computed_whole_for


def test_a_copy_on_the_host_is_made_tile_by_tile() -> None:
    logits = logits_of_tiles()[:, 1:].transpose(1, 2)

    copied = logits.copy_to_host("cpu")

    torch.testing.assert_close(copied, linear()(hidden_states())[:, 1:].transpose(1, 2).detach())
    assert not copied.requires_grad and not logits.head.computed_whole_for


def test_it_cannot_be_computed_when_the_weights_are_gone() -> None:
    logits = logits_of_tiles()
    largest = logits.amax(-1)
    logits.head.close()

    assert largest.isfinite().all()
    with pytest.raises(ModelError, match="used after its backward pass or its step"):
        logits.sum()


def test_a_hook_after_a_loss_was_made_is_refused() -> None:
    logits = logits_of_tiles()
    logits.logsumexp(-1).sum()

    with pytest.raises(UnsupportedError, match="register_hook"):
        logits.register_hook(lambda gradient: gradient)


def test_a_hook_sees_the_gradient_of_what_is_made_later() -> None:
    logits, seen = logits_of_tiles(), []
    view = logits[:, 1:]
    logits.register_hook(seen.append)

    (logits.logsumexp(-1).sum() + view.amax(-1).sum()).backward()

    assert [gradient.shape for gradient in seen] == [logits.shape]


def test_the_same_tiles_give_the_same_bits() -> None:
    (one, gradients), (other, others) = (
        run(transformers_loss, m := linear(), head_of(m, hidden_states())) for _ in "12"
    )

    assert torch.equal(one, other)
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_of_the_program_is_that_of_each_function(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss, expected = (
            F.cross_entropy(logits.flatten(0, 1), Data().labels.flatten())
            for logits in (logits_of_tiles(), linear()(hidden_states()))
        )

    assert loss.dtype is expected.dtype
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-3)


def test_gradients_of_16_bits_are_gathered_tile_by_tile() -> None:
    module = linear().bfloat16()
    sums = {name: torch.zeros_like(own, dtype=torch.float32) for name, own in module.named_parameters()}
    gathered = 0

    def gather() -> None:
        nonlocal gathered
        gathered += 1
        for name, own in module.named_parameters():
            sums[name] += require(own.grad).float()
            own.grad = None

    hidden = hidden_states().detach().bfloat16().requires_grad_()
    logits = TokenTensor.of_head(head_of(module, hidden, TILE, gather))
    assert logits is not None
    F.cross_entropy(logits.float().flatten(0, 1), Data().labels.flatten()).backward()

    exact = linear()
    F.cross_entropy(exact(hidden_states()).flatten(0, 1), Data().labels.flatten()).backward()
    assert gathered == -(-ROWS * LENGTH // TILE)
    for name, own in exact.named_parameters():
        torch.testing.assert_close(sums[name], require(own.grad), rtol=3e-2, atol=2e-3)
