"""Which calls are proved to treat each token by itself; and whatever is proved is true of values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds.model.token_proof import ModuleCall, TokenProof, prove
from harmony_ds.model.token_rules import TokenPlace, TokensMixedError

ROWS, TOKENS, WIDTH = 2, 12, 8
TILES = (5, 4, 3)
Function = Callable[[Tensor], Any]


class Calling(nn.Module):
    """Calls a function, with a few parameters at hand."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)))
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[Any] = []
        self.last: Any = None

    def forward(self, hidden: Tensor, *more: Any) -> Any:
        return self.function(self, hidden, *more)


def proof_of(module: nn.Module, *args: Any, dim: int = 1, tiles: tuple[int, ...] = TILES) -> TokenProof:
    return prove(ModuleCall.taken_apart(module, module.forward, args, {}), dim, tiles)


def hidden_states(rows: int = ROWS, tokens: int = TOKENS) -> Tensor:
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()


def per_head_norm(module: Any, hidden: Tensor) -> Tensor:
    heads = hidden.view(*hidden.shape[:2], 2, -1).transpose(1, 2)
    return F.rms_norm(heads, heads.shape[-1:]).transpose(1, 2).flatten(2)


def top_experts(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.linear(hidden.reshape(-1, WIDTH), module.weight).softmax(-1)
    weights, experts = scores.topk(2, dim=-1)
    return weights / weights.sum(-1, keepdim=True), experts


def written_by_parts(module: Any, hidden: Tensor) -> Tensor:
    made = torch.zeros_like(hidden)
    made[..., :3] = hidden[..., 1:4]
    made[..., 3:].add_(1)
    return made


ALONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "mlp": lambda m, x: F.linear(F.silu(F.linear(x, m.weight)) * F.linear(x, m.weight, m.scale), m.weight),
    "rms norm in fp32": lambda m, x: (
        m.scale * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))
    ),
    "layer norm": lambda m, x: F.layer_norm(x, (WIDTH,), m.scale, m.scale),
    "norm of heads": per_head_norm,
    "one row of tokens": lambda m, x: F.linear(x.view(-1, WIDTH), m.weight).view(x.shape),
    "a router": top_experts,
    "einsum": lambda m, x: torch.einsum("bth,hk->btk", x, m.weight),
    "weights on the left": lambda m, x: (m.weight @ x.reshape(-1, WIDTH).t()).t().reshape(x.shape),
    "gates in one product": lambda m, x: torch.mul(*torch.cat([x, x], -1).chunk(2, dim=-1)),
    "a look-up": lambda m, x: F.embedding(x.argmax(-1), m.weight) + m.table[x.argmax(-1)],
    "sums within a token": lambda m, x: (
        x.cumsum(-1) + x.logsumexp(-1, keepdim=True) + x.flip(-1) + x.norm(dim=-1)[..., None]
    ),
    "a constant": lambda m, x: torch.where(x > 0, x, torch.tensor(0.5)) * m.scale.sum(),
    "written in place": written_by_parts,
    "joined": lambda m, x: torch.stack([x, x * 2], dim=1).sum(1) + torch.cat([x, x], dim=0)[:ROWS],
}


@pytest.mark.parametrize("name", ALONE)
def test_what_treats_each_token_by_itself_is_proved(name: str) -> None:
    module = Calling(ALONE[name])
    proof = proof_of(module, hidden_states())
    assert proof.places == (TokenPlace(1),)
    assert_true_of_values(module, hidden_states(), proof)


def capacity(module: Any, hidden: Tensor) -> Tensor:
    return hidden * (torch.arange(WIDTH) < max(1, hidden.shape[1] // 2))


def only_long(module: Any, hidden: Tensor) -> Tensor:
    return hidden - hidden.mean(1, keepdim=True) if hidden.shape[1] > 8 else hidden * 2


def counting(module: Any, hidden: Tensor) -> Tensor:
    module.calls += 1
    return hidden * 2


def remembering(module: Any, hidden: Tensor) -> Tensor:
    module.last = hidden.detach()
    return hidden * 2


def collecting(module: Any, hidden: Tensor) -> Tensor:
    module.seen.append(1)
    return hidden * 2


def hooked(module: Any, hidden: Tensor) -> Tensor:
    made = hidden * 2
    made.register_hook(lambda gradient: gradient / gradient.norm())
    return made


def caught(module: Any, hidden: Tensor) -> Tensor:
    try:
        hidden.cumsum(1)
    except BaseException:  # noqa: BLE001 - the program's, not the engine's
        return hidden * 2
    return hidden * 2


def in_place(module: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        hidden.mul_(2)
    return hidden * 2


class MeanOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True)


def self_attention(module: Any, hidden: Tensor) -> Tensor:
    return (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden


TOGETHER: dict[str, Callable[[Any, Tensor], Any]] = {
    "attention": self_attention,
    "fused attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "batch norm": lambda m, x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view(x.shape),
    "norm over tokens": lambda m, x: F.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2),
    "mean over tokens": lambda m, x: x - x.mean(1, keepdim=True),
    "mean over all": lambda m, x: x / x.abs().max(),
    "cumulative sum": lambda m, x: x.cumsum(1),
    "shift": lambda m, x: torch.cat([x[:, 1:], x[:, :1]], dim=1),
    "roll": lambda m, x: x + x.roll(1, 1),
    "padding": lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "convolution": lambda m, x: F.conv1d(x.transpose(1, 2), m.weight[..., None].repeat(1, 1, 3), padding=1).transpose(
        1, 2
    ),
    "the last token": lambda m, x: x + x[:, -1:],
    "every other token": lambda m, x: x[:, ::2].repeat_interleave(2, 1),
    "positions": lambda m, x: x + torch.arange(x.shape[1])[:, None],
    "a table of positions": lambda m, x: x + m.table[: x.shape[1]],
    "length": lambda m, x: x / x.shape[1],
    "a tensor of the length": lambda m, x: x * torch.tensor(float(x.shape[1])),
    "capacity": capacity,
    "only long rows": only_long,
    "pairs of tokens": lambda m, x: F.linear(x.view(ROWS, -1, 2 * WIDTH), torch.cat([m.weight, m.weight], 1)),
    "rows and tokens": lambda m, x: x.reshape(ROWS, WIDTH, -1).softmax(-1).view(x.shape),
    "sorted": lambda m, x: x.sort(1).values,
    "the best tokens": lambda m, x: x * (x >= x.topk(3, dim=1).values[:, -1:]),
    "chosen tokens": lambda m, x: x[x[..., 0] > 0],
    "a value": lambda m, x: x * x.sum(-1).max().item(),
    "dropout": lambda m, x: F.dropout(x, 0.5, training=True),
    "random choice": lambda m, x: x * 2 if random.random() < 2 else x,
    "an autograd.Function": lambda m, x: MeanOfGradients.apply(x),
    "a hook": hooked,
    "a refusal that is caught": caught,
    "a counter": counting,
    "a memory": remembering,
    "a list": collecting,
    "its input changed": in_place,
    "its input returned": lambda m, x: x,
    "a view returned": lambda m, x: x.view(ROWS, TOKENS if x.shape[1] == TOKENS else -1, WIDTH),
    "a loss beside": lambda m, x: (x * 2, (x * 2).mean()),
    "something it had": lambda m, x: (x * 2, m.scale * 2),
    "an object": lambda m, x: (x * 2, object()),
    "nothing": lambda m, x: None,
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_takes_tokens_together_is_not_proved(name: str) -> None:
    module = Calling(TOGETHER[name])
    hidden = hidden_states()
    numbers, before = random.getstate(), [*vars(module)]
    with pytest.raises(TokensMixedError):
        proof_of(module, hidden)
    assert random.getstate() == numbers
    assert (module.last, module.seen, module.calls.item(), [*vars(module)]) == (None, [], 0, before)
    assert torch.equal(hidden, hidden_states())
    assert hidden._version == 0


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_kernel_that_is_launched_past_torchs_operators_gets_no_address() -> None:
    """As Triton's are: on a GPU, one that runs on address 0 ends CUDA for the process."""
    launched: list[int] = []

    def kernel(module: Any, hidden: Tensor) -> Tensor:
        result = torch.empty(hidden.shape)
        launched.append(result.data_ptr())
        return result

    with pytest.raises(TokensMixedError, match=r"cannot be traced: .*Cannot access data pointer"):
        proof_of(Calling(kernel), hidden_states())
    assert not launched


def test_hooks_on_inner_modules_are_refused_and_own_ones_are_not() -> None:
    module = Calling(lambda m, x: m.inner(x).relu())
    module.register_forward_hook(lambda *_: None)
    assert proof_of(module, hidden_states()).places == (TokenPlace(1),)
    module.inner.register_forward_hook(lambda *_: None)
    with pytest.raises(TokensMixedError, match="hooks"):
        proof_of(module, hidden_states())


def test_arguments_hold_tokens_where_they_are_as_long_as_the_first() -> None:
    module = Calling(lambda m, x, mask, scale: x * mask[..., None] * scale)
    proof = proof_of(module, hidden_states(), torch.ones(ROWS, TOKENS), torch.ones(WIDTH))
    assert proof.places == (TokenPlace(1), TokenPlace(1), None)
    with pytest.raises(TokensMixedError, match="may write"):
        proof_of(module, hidden_states(), torch.ones(ROWS, TOKENS), object())


def test_a_length_that_only_some_tiles_have_is_seen() -> None:
    module = Calling(lambda m, x: x * 2 if x.shape[1] != 3 else x * 3)
    assert proof_of(module, hidden_states(), tiles=(4,))
    with pytest.raises(TokensMixedError, match="3 tokens than with 12"):
        proof_of(module, hidden_states(), tiles=(4, 3))


def test_inner_bytes_are_those_that_a_graph_keeps_beside_inputs_and_outputs() -> None:
    of_token = WIDTH * 4
    inputs = ROWS * TOKENS * of_token
    projection = proof_of(Calling(lambda m, x: F.linear(x, m.weight)), hidden_states())
    assert (projection.inner_bytes, projection.input_bytes) == (0, inputs)
    two = proof_of(Calling(lambda m, x: F.linear(F.silu(F.linear(x, m.weight)), m.weight)), hidden_states())
    assert two.inner_bytes == 2 * inputs  # before and after the activation


def test_a_proof_needs_no_memory() -> None:
    """A layer of Llama 8B's MLP, at 131,072 tokens."""
    with torch.device("meta"):
        gate, up, down = (nn.Linear(4096, 14336), nn.Linear(4096, 14336), nn.Linear(14336, 4096))
        hidden = torch.empty(1, 2**17, 4096, dtype=torch.bfloat16, requires_grad=True)
    mlp = nn.Module().to(torch.bfloat16)
    mlp.gate, mlp.up, mlp.down = (one.to(torch.bfloat16) for one in (gate, up, down))
    mlp.forward = lambda x: mlp.down(F.silu(mlp.gate(x)) * mlp.up(x))  # type: ignore[method-assign]
    proof = proof_of(mlp, hidden, tiles=(4096,))
    assert proof.inner_bytes == 4 * 2**17 * 14336 * 2


# ---- proofs and values

STEPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu": lambda m, x: x.relu(),
    "linear": lambda m, x: x @ m.weight if x.shape[-1] == WIDTH else x * 2,
    "softmax": lambda m, x: x.softmax(-1),
    "softmax of the first": lambda m, x: x.softmax(0),
    "softmax of the second": lambda m, x: x.softmax(min(1, x.dim() - 1)),
    "sum": lambda m, x: x.sum(-1, keepdim=True) + x,
    "mean of the second": lambda m, x: x - x.mean(min(1, x.dim() - 1), keepdim=True),
    "transpose": lambda m, x: x.transpose(0, -1).contiguous(),
    "swap": lambda m, x: x.transpose(0, min(1, x.dim() - 1)).contiguous(),
    "flat": lambda m, x: x.reshape(-1, x.shape[-1]),
    "rows": lambda m, x: x.reshape(ROWS, -1, WIDTH),
    "flatten last": lambda m, x: x.reshape(x.shape[0], -1),
    "heads": lambda m, x: x.unflatten(-1, (2, -1)) if x.shape[-1] % 2 == 0 else x,
    "first entries": lambda m, x: x[..., : max(1, x.shape[-1] // 2)],
    "twice": lambda m, x: torch.cat([x, x], -1),
    "stack": lambda m, x: torch.stack([x, x], 1).sum(1),
    "expand": lambda m, x: x.unsqueeze(0).expand(3, *x.shape).sum(0),
    "cumsum": lambda m, x: x.cumsum(-1),
    "scaled": lambda m, x: x * m.scale if x.shape[-1] == WIDTH else x,
    "table": lambda m, x: x + m.table[: x.shape[-2]] if x.dim() > 1 and x.shape[-1] == WIDTH else x,
}


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), st.sampled_from([0, 1, 2]))
def test_whatever_is_proved_is_true_of_values(names: list[str], dim: int) -> None:
    def function(module: Any, hidden: Tensor) -> Tensor:
        for name in names:
            hidden = STEPS[name](module, hidden)
        return hidden * 2

    module, hidden = Calling(function), torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(4))
    hidden.requires_grad_()
    count = hidden.shape[dim]
    try:
        proof = proof_of(module, hidden, dim=dim, tiles=(count // 2, count - count // 2))
    except TokensMixedError:
        return
    assert_true_of_values(module, hidden, proof, dim, count // 2)


def assert_true_of_values(module: nn.Module, hidden: Tensor, proof: TokenProof, dim: int = 1, first: int = 5) -> None:
    """Two parts give what the whole gives, and their gradients."""
    count = hidden.shape[dim]
    whole = tensors_of(module(hidden))
    outputs = [output for output in proof.outputs if output.place is not None]
    assert [tuple(t.shape) for t in whole] == [output.shape for output in outputs]
    seeds = [torch.arange(t.numel(), dtype=torch.float32).sin().view(t.shape) for t in whole]
    expected = gradients_of(whole, seeds, module, hidden)
    totals: list[Tensor] | None = None
    of_inputs = []
    for begin, length in ((0, first), (first, count - first)):
        part = hidden.detach().narrow(dim, begin, length).contiguous().requires_grad_()
        made = tensors_of(module(part))
        own_seeds = []
        for one, all_tokens, output, seed in zip(made, whole, outputs, seeds, strict=True):
            assert output.place is not None
            expected_part = output.place.narrow(all_tokens, begin, length)
            assert torch.allclose(output.place.narrow(one, 0, length), expected_part, atol=1e-5)
            own_seeds.append(output.place.narrow(seed, begin, length).reshape(one.shape))
        own, *parameters = gradients_of(made, own_seeds, module, part)
        of_inputs.append(own)
        totals = parameters if totals is None else [a + b for a, b in zip(totals, parameters, strict=True)]
    assert totals is not None
    for one, other in zip([torch.cat(of_inputs, dim), *totals], expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-4)


def tensors_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def gradients_of(made: list[Tensor], seeds: list[Tensor], module: nn.Module, hidden: Tensor) -> list[Tensor]:
    pairs = [(t, seed) for t, seed in zip(made, seeds, strict=True) if t.requires_grad]
    wanted = [hidden, *module.parameters()]
    if not pairs:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad([t for t, _ in pairs], wanted, [seed for _, seed in pairs], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
