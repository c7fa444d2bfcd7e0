"""Small models on quantized, frozen bases, with adapters: bitsandbytes, torchao, and what users write by hand.

`build(kind)` gives the same bits at every call. The base is a Llama whose linear layers in the blocks are quantized; LoRA
matrices stand beside each, and they and the norms are trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.families import Batch

WIDTH = 256
"""Wide enough that integer buffers count as weights: 256 rows of 32 int32."""
VOCABULARY = 96
LAYERS = 3


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank product beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, inputs, dtype=dtype) / inputs**0.5)
        self.b = nn.Parameter(torch.randn(outputs, 4, dtype=dtype) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x.to(self.a.dtype), self.a), self.b).to(x.dtype)


class Codes(nn.Module):
    """Integer codes in a parameter; scales and zeros in a dict (like HQQ)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        low, high = linear.weight.detach().aminmax(dim=1, keepdim=True)
        scale = (high - low) / 255
        self.W_q = nn.Parameter(((linear.weight.detach() - low) / scale).round().to(torch.uint8), requires_grad=False)
        self.meta = {"scale": scale, "zero": low, "shape": linear.weight.shape, "nbits": 8}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.W_q.to(x.dtype) * self.meta["scale"] + self.meta["zero"]
        return F.linear(x, weight.to(x.dtype))


class DequantizedAgain(torch.autograd.Function):
    """A product with a weight that backward dequantizes again, by a method of its module (as HQQ does)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dequantize: Callable[[torch.dtype], Tensor]) -> Tensor:
        ctx.dequantize = dequantize
        return F.linear(x, dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.dequantize(gradient.dtype), None


class CodesReadAgain(Codes):
    def forward(self, x: Tensor) -> Tensor:
        return DequantizedAgain.apply(x, self.dequantize)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.W_q.to(dtype) * self.meta["scale"] + self.meta["zero"]).to(dtype)


class MadeInInferenceMode(CodesReadAgain):
    """Scales and zeros that were searched for in inference mode (as HQQ does)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        with torch.inference_mode():
            self.meta = {key: one.clone() if isinstance(one, Tensor) else one for key, one in self.meta.items()}


class Packed4Bit(nn.Module):
    """Codes of 4 bits, eight in an int32, and scales in buffers; no parameter (like GPTQ and AWQ)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1, keepdim=True) / 7
        digits = ((weight / scales).round() + 8).to(torch.int64).view(len(weight), -1, 8)
        packed = (digits << (4 * torch.arange(8))).sum(-1)
        self.register_buffer("qweight", torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32))
        self.register_buffer("scales", scales.to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        digits = (self.qweight.unsqueeze(-1) >> (4 * torch.arange(8, device=x.device, dtype=torch.int32))) & 15
        return F.linear(x, (digits.flatten(1).to(x.dtype) - 8) * self.scales)


class GroupedBuffers(nn.Module):
    """Codes of 4 bits, their zeros, the group of each row, scales in fp16, and a bias, all of them buffers (like GPTQ)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float().T
        group = torch.arange(len(weight)) // 64
        scales = (weight.unflatten(0, (-1, 64)).abs().amax(1) / 7).half()
        digits = (weight / scales.float()[group]).round().clamp(-8, 7) + 8
        self.register_buffer("qweight", self.packed(digits.T).T.contiguous())
        self.register_buffer("qzeros", self.packed(torch.full(scales.shape, 8.0)))
        self.register_buffer("scales", scales)
        self.register_buffer("g_idx", group.int())
        self.register_buffer("bias", torch.zeros(linear.out_features).half())

    def packed(self, digits: Tensor) -> Tensor:
        words = (digits.long().unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).int()

    def unpacked(self, words: Tensor) -> Tensor:
        return ((words.unsqueeze(-1) >> (4 * torch.arange(8, device=words.device, dtype=torch.int32))) & 15).flatten(1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        group = self.g_idx.long()
        digits = self.unpacked(self.qweight.T).T - self.unpacked(self.qzeros)[group]
        return (digits.half() * self.scales[group]).T.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return DequantizedAgain.apply(x, self.dequantize) + self.bias.to(x.dtype)


class Int8Buffer(nn.Module):
    """Codes and scales in buffers that no state dict holds."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8), persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Float8Buffer(nn.Module):
    """A weight in float8 and its scale, in buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale_inv", linear.weight.detach().abs().amax() / 448)
        self.register_buffer("weight", (linear.weight.detach() / self.scale_inv).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale_inv)


class HalvedTensor(Tensor):
    """A weight in int8 with a scale a row: a wrapper subclass as a user writes one."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> HalvedTensor:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"dtype": self.dtype}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, strides: Any) -> HalvedTensor:
        return HalvedTensor(inner["codes"], inner["scale"], context["dtype"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes.to(weight.dtype) * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            one = args[0]
            return HalvedTensor(func(one.codes), func(one.scale), one.dtype)
        raise NotImplementedError(f"{func} of a HalvedTensor")


def halved(linear: nn.Linear) -> nn.Module:
    weight = linear.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    wrapped = HalvedTensor((weight / scale).round().to(torch.int8), scale, weight.dtype)
    linear.weight = nn.Parameter(wrapped, requires_grad=False)
    return linear


class Float8(nn.Linear):
    """A float8 parameter and its scale (like FP8 checkpoints)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def float8(linear: nn.Linear) -> nn.Module:
    made = Float8(linear.in_features, linear.out_features, bias=False)
    scale = linear.weight.detach().float().abs().amax() / 448
    made.scale = nn.Parameter(scale, requires_grad=False)
    made.weight = nn.Parameter((linear.weight.detach().float() / scale).to(torch.float8_e4m3fn), requires_grad=False)
    return made


def bitsandbytes_4bit(quant_type: str, double: bool, storage: torch.dtype = torch.uint8) -> Callable[..., nn.Module]:
    def quantize(linear: nn.Linear) -> nn.Module:
        import bitsandbytes

        made = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=linear.weight.dtype,
            compress_statistics=double,
            quant_type=quant_type,
            quant_storage=storage,
        )
        made.weight = bitsandbytes.nn.Params4bit(
            linear.weight.detach().clone(),
            requires_grad=False,
            compress_statistics=double,
            quant_type=quant_type,
            quant_storage=storage,
            module=made,
        )
        return made.to("cpu")

    return quantize


def bitsandbytes_int8(linear: nn.Linear) -> nn.Module:
    import bitsandbytes

    made = bitsandbytes.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=6.0
    )
    made.weight = bitsandbytes.nn.Int8Params(
        linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False
    )
    return made.to("cpu")


def bitsandbytes_parametrized(quant_type: str) -> Callable[..., nn.Module]:
    """Return what gives a layer a weight that a parametrization dequantizes (as bitsandbytes does for experts)."""

    def quantize(linear: nn.Linear) -> nn.Module:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        replace_parameter_4bit(linear, "weight", compress_statistics=True, quant_type=quant_type)
        return linear

    return quantize


def torchao(make_config: Callable[[Any], Any]) -> Callable[..., nn.Module]:
    def quantize(linear: nn.Linear) -> nn.Module:
        from torchao import quantization

        holder = nn.Sequential(linear)
        quantization.quantize_(holder, make_config(quantization))
        holder[0].weight.requires_grad_(False)
        return holder[0]

    return quantize


def torchao_nf4(linear: nn.Linear) -> nn.Module:
    from torchao.quantization import to_nf4

    linear.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 2), requires_grad=False)
    return LinearNF4(linear)


class LinearNF4(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(input=x, weight=self.weight)


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "hand-written wrapper": halved,
    "integer parameter": Codes,
    "integer parameter, read in backward": CodesReadAgain,
    "integer parameter, in inference mode": MadeInInferenceMode,
    "float8 parameter": float8,
    "integer buffers": Packed4Bit,
    "buffers in groups, read in backward": GroupedBuffers,
    "int8 buffers": Int8Buffer,
    "float8 buffers": Float8Buffer,
    "bitsandbytes NF4": bitsandbytes_4bit("nf4", double=False),
    "bitsandbytes NF4, double": bitsandbytes_4bit("nf4", double=True),
    "bitsandbytes NF4, in bf16": bitsandbytes_4bit("nf4", double=True, storage=torch.bfloat16),
    "bitsandbytes FP4": bitsandbytes_4bit("fp4", double=False),
    "bitsandbytes NF4, parametrized": bitsandbytes_parametrized("nf4"),
    "bitsandbytes int8": bitsandbytes_int8,
    "torchao int8": torchao(lambda q: q.Int8WeightOnlyConfig()),
    "torchao float8": torchao(lambda q: q.Float8WeightOnlyConfig()),
    "torchao intx": torchao(lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "torchao NF4": torchao_nf4,
}


def build(
    kind: str | Callable[[nn.Linear], nn.Module],
    dtype: torch.dtype = torch.float32,
    layers: int = LAYERS,
    lora: torch.dtype | None = None,
) -> nn.Module:
    """Return a model whose blocks' linear layers are of this kind (or made by it), the same bits at every call."""
    quantize = KINDS[kind] if isinstance(kind, str) else kind
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.requires_grad_(False)
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        base = quantize(linear)
                    setattr(part, name, LoraLinear(base, linear.in_features, linear.out_features, lora or dtype))
        block.input_layernorm.requires_grad_(True)
    return model.train()


def stored_bytes(kind: str, model: nn.Module) -> int:
    """Return the bytes of the codes of all quantized weights, scales apart."""
    bits = 4 if any(word in kind for word in ("NF4", "FP4", "integer buffers", "in groups")) else 8
    layers = [one for one in model.modules() if isinstance(one, LoraLinear)]
    return sum(one.a.shape[1] * one.b.shape[0] for one in layers) * bits // 8


def batch(index: int) -> Batch:
    """Return micro-batch `index`: two rows of tokens."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, VOCABULARY, (2, 7 + index % 3), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
