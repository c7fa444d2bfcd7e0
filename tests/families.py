"""Small models to train in tests: 21 Hugging Face families and a few awkward modules of our own.

A `Family` enters a test as a recipe: `build(dropout)` gives a freshly initialised model in training mode, the same
bits at every call, and `batch(index)` gives the keyword arguments of micro-batch `index`, the same at every call.
Nothing here reads a file or the network, and nothing here knows the engine.

Every model is tiny (2 to 5 layers, hidden 32, at most 12 tokens) and every batch holds two samples. Text batches are
ragged: the length changes with the index, and at odd indices the second sample is padded. `use_cache` stays at each
configuration's default, so most decoders build a key-value cache while they train. In GPT-2 and OPT with dropout that
changes the strides of keys and values, and so the last bits of the gradients, though not the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Any]

VOCABULARY = 96
HIDDEN = 32
WIDTH = 16
BUILD_SEED = 20
IGNORED = -100
PAD, BEGIN, END = 0, 1, 2
FIRST_WORD = 3
IMAGE_CLASSES = 5
INITIALIZER_RANGE = 0.1  # the usual 0.02 leaves so small a model with near ties between experts and tokens


@dataclass(frozen=True)
class Family:
    """One kind of model under test.

    `bitwise` is False where some parameter's gradient within one micro-batch is a sum of contributions from different
    places of the model. Plain PyTorch adds those up first and then adds the sum to `.grad`; an engine that adds each
    contribution as it arrives rounds differently, and so do sums of three or more activations' gradients. A two-term
    sum of activations' gradients commutes exactly and does not make a family inexact. Micro-batches are assumed to be
    added in their order, also by modules that skip layers. Train inexact families with SGD, or with Adam at an `eps` of
    1e-4: some gradients are nothing but rounding (attention key biases), and Adam at 1e-8 blows those up.
    """

    name: str
    build: Callable[[float], nn.Module]
    batch: Callable[[int], Batch]
    bitwise: bool

    def __str__(self) -> str:
        return self.name


# Micro-batches of the Hugging Face families. B = 2 samples, T tokens.


def generator_of(index: int) -> torch.Generator:
    """Return the generator of micro-batch `index`, so that a batch does not use the global one."""
    return torch.Generator().manual_seed(1000 + index)


def ragged_length(index: int, longest: int = 12) -> int:
    """12, 10, 8, 12, ... tokens."""
    return longest - 2 * (index % 3)


def ragged_mask(index: int, length: int) -> Tensor:
    """(B, T) ones; at odd indices the last three tokens of the second sample are padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    if index % 2 == 1:
        mask[1, -3:] = 0
    return mask


def random_words(generator: torch.Generator, length: int) -> Tensor:
    """(B, T) token ids without the special tokens at either end of the vocabulary."""
    return torch.randint(FIRST_WORD, VOCABULARY - 2, (2, length), generator=generator)


def causal_batch(index: int) -> Batch:
    """Next-word prediction; padding is masked and not predicted."""
    mask = ragged_mask(index, ragged_length(index))
    words = random_words(generator_of(index), mask.shape[1]).masked_fill(mask == 0, PAD)
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, IGNORED)}


def masked_language_batch(index: int) -> Batch:
    """Every third word is to be predicted."""
    mask = ragged_mask(index, ragged_length(index))
    words = random_words(generator_of(index), mask.shape[1]).masked_fill(mask == 0, PAD)
    labels = torch.full_like(words, IGNORED)
    labels[:, ::3] = words[:, ::3]
    labels.masked_fill_(mask == 0, IGNORED)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def sequence_to_sequence_batch(index: int) -> Batch:
    """Source and target have different lengths, both ragged."""
    generator = generator_of(index)
    mask = ragged_mask(index, ragged_length(index))
    source = random_words(generator, mask.shape[1]).masked_fill(mask == 0, PAD)
    return {"input_ids": source, "attention_mask": mask, "labels": ragged_target(generator, index)}


def speech_batch(index: int) -> Batch:
    """(B, 8 mel bins, 24 frames): Whisper takes no other number of frames. The target is ragged."""
    generator = generator_of(index)
    features = torch.randn(2, 8, 24, generator=generator)
    return {"input_features": features, "labels": ragged_target(generator, index)}


def ragged_target(generator: torch.Generator, index: int) -> Tensor:
    """(B, T) labels of a decoder, 8 to 6 long; shorter by three in the second sample at odd indices."""
    mask = ragged_mask(index, 8 - index % 3)
    return random_words(generator, mask.shape[1]).masked_fill(mask == 0, IGNORED)


def image_batch(index: int, size: int) -> Batch:
    """(B, 3, size, size) pictures and their classes."""
    generator = generator_of(index)
    pixels = torch.randn(2, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, IMAGE_CLASSES, (2,), generator=generator)}


def image_and_text_batch(index: int) -> Batch:
    """CLIP reads a text at its end token, so each one has its own; the loss has to be asked for with a plain bool."""
    generator = generator_of(index)
    mask = ragged_mask(index, ragged_length(index))
    words = random_words(generator, mask.shape[1]).masked_fill(mask == 0, PAD)
    words[torch.arange(2), mask.sum(dim=1) - 1] = VOCABULARY - 1
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return {"input_ids": words, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}


# The Hugging Face families.


def build_transformer(architecture: str, **settings: Any) -> nn.Module:
    """Return a model of `architecture` (a class name in transformers) with its class's configuration."""
    import transformers

    model_class = getattr(transformers, architecture)
    configuration = model_class.config_class(**copy.deepcopy(settings))
    return build_seeded(lambda: model_class(configuration))


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Run `build` from a fixed seed, leave the global random stream as it was, and return the model for training.

    Parameters that start as zeros (biases) become random: some of them, such as the bias of attention keys, have a zero
    gradient but for rounding, and a difference relative to the largest value means nothing while all values are noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(BUILD_SEED)
        model = build().train()
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=INITIALIZER_RANGE)
        return model


SPECIAL_TOKENS: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
TEXT: dict[str, Any] = SPECIAL_TOKENS | {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
BLOCKS: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "initializer_range": INITIALIZER_RANGE,
}  # fmt: skip
DECODER = TEXT | BLOCKS
GROUPED_DECODER: dict[str, Any] = DECODER | {"num_key_value_heads": 2}
QWEN3_MOE = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "init_std": INITIALIZER_RANGE,
}  # fmt: skip
ATTENTION = ("attention_dropout",)
OF_BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BART = {"decoder_start_token_id": END, "forced_eos_token_id": END}
OF_BART = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")


def transformer(
    name: str,
    architecture: str,
    settings: dict[str, Any],
    dropouts: tuple[str, ...] = ATTENTION,
    batch: Callable[[int], Batch] = causal_batch,
    *,
    bitwise: bool,
) -> Family:
    """Make a family of transformers. The settings named in `dropouts` take the rate of dropout."""

    def build(dropout: float) -> nn.Module:
        return build_transformer(architecture, **settings, **dict.fromkeys(dropouts, dropout))

    return Family(name, build, batch, bitwise)


def build_clip(dropout: float) -> nn.Module:
    tower = BLOCKS | {"num_hidden_layers": 2, "projection_dim": WIDTH, "attention_dropout": dropout}
    del tower["initializer_range"]
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": PAD}
    ends = {"bos_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1}
    return build_transformer(
        "CLIPModel",
        text_config=tower | words | ends,
        vision_config=tower | {"image_size": 16, "patch_size": 8},
        projection_dim=WIDTH,
    )


GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": HIDDEN, "n_layer": 3, "n_head": 4}
WINDOW = {"head_dim": 8, "sliding_window": 4}
GEMMA3 = {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
    "sliding_attention", "full_attention"], "global_head_dim": 16, "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
OPT = {
    "hidden_size": HIDDEN, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "word_embed_proj_dim": 24,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "pad_token_id": PAD,
    "eos_token_id": END, "decoder_start_token_id": PAD,
}  # fmt: skip
WHISPER = {
    "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "decoder_start_token_id": BEGIN,
    "begin_suppress_tokens": None,
}  # fmt: skip
VIT = {"image_size": 16, "patch_size": 4, "num_labels": IMAGE_CLASSES}
RESNET = {
    "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 1], "layer_type": "bottleneck",
    "num_labels": IMAGE_CLASSES,
}  # fmt: skip
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "state_size": 4, "num_hidden_layers": 3}
DEEPSEEK_V3 = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip

TIED = False  # the embedding is the output layer too: one parameter, two contributions to each micro-batch's gradient
SUMMED = False  # an activation feeds three or more places in different layers

FAMILIES: tuple[Family, ...] = (
    transformer("gpt2", "GPT2LMHeadModel", SPECIAL_TOKENS | GPT2 | {"initializer_range": INITIALIZER_RANGE},
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"), bitwise=TIED),
    transformer("llama", "LlamaForCausalLM", GROUPED_DECODER, bitwise=True),
    transformer("qwen3", "Qwen3ForCausalLM", GROUPED_DECODER | {"head_dim": 8}, bitwise=True),
    transformer("mistral", "MistralForCausalLM", GROUPED_DECODER | {"sliding_window": 4}, bitwise=True),
    transformer("gemma3", "Gemma3ForCausalLM", GROUPED_DECODER | WINDOW | GEMMA3, bitwise=TIED),
    # The last three layers borrow keys and values: two of them from layer 0, which so has three readers, one from 1.
    transformer("gemma4", "Gemma4ForCausalLM", GROUPED_DECODER | WINDOW | GEMMA4, bitwise=TIED and SUMMED),
    transformer("phi3", "Phi3ForCausalLM", GROUPED_DECODER, ("resid_pdrop", "embd_pdrop", "attention_dropout"),
        bitwise=True),
    transformer("opt", "OPTForCausalLM", TEXT | OPT | {"init_std": INITIALIZER_RANGE},
        ("dropout", "attention_dropout", "layerdrop"), bitwise=TIED),
    transformer("gpt_neox", "GPTNeoXForCausalLM", DECODER,
        ("hidden_dropout", "attention_dropout", "classifier_dropout"), bitwise=True),
    transformer("bert", "BertForMaskedLM", DECODER, OF_BERT, masked_language_batch, bitwise=TIED),
    transformer("roberta", "RobertaForMaskedLM", DECODER, OF_BERT, masked_language_batch, bitwise=TIED),
    # One embedding for encoder, decoder and output; block 0's position bias and the encoder output feed every block.
    transformer("t5", "T5ForConditionalGeneration", T5, ("dropout_rate", "classifier_dropout"),
        sequence_to_sequence_batch, bitwise=TIED and SUMMED),
    # The encoder's output feeds every block of the decoder, as in T5.
    transformer("bart", "BartForConditionalGeneration", TEXT | ENCODER_DECODER | BART, OF_BART,
        sequence_to_sequence_batch, bitwise=TIED and SUMMED),
    transformer("whisper", "WhisperForConditionalGeneration", SPECIAL_TOKENS | ENCODER_DECODER | WHISPER, OF_BART,
        speech_batch, bitwise=TIED and SUMMED),
    transformer("vit", "ViTForImageClassification", BLOCKS | VIT, OF_BERT, partial(image_batch, size=16),
        bitwise=True),
    # Without dropout of any kind, as Mamba.
    transformer("resnet", "ResNetForImageClassification", RESNET, (), partial(image_batch, size=32), bitwise=True),
    # Router jitter, the other random knob, multiplies the expert inputs by a number in 1 +- dropout, in place.
    transformer("mixtral", "MixtralForCausalLM", GROUPED_DECODER | EXPERTS | {"num_local_experts": 4},
        ("attention_dropout", "router_jitter_noise"), bitwise=True),
    transformer("qwen3_moe", "Qwen3MoeForCausalLM", GROUPED_DECODER | EXPERTS | QWEN3_MOE, bitwise=True),
    transformer("mamba", "MambaForCausalLM", SPECIAL_TOKENS | MAMBA | {"initializer_range": INITIALIZER_RANGE}, (),
        bitwise=TIED),
    Family("clip", build_clip, image_and_text_batch, bitwise=True),
    # The first layer is dense, the other two are mixtures of experts with one shared expert.
    transformer("deepseek_v3", "DeepseekV3ForCausalLM", DECODER | DEEPSEEK_V3, bitwise=True),
)  # fmt: skip


# Modules of our own, each with one habit that an engine gets wrong. B = 2 samples, T positions, WIDTH features.


@dataclass
class NetOutput:
    """Output of most of the modules: no mapping, no registered pytree, only attributes."""

    loss: Tensor
    prediction: Tensor


class InjectedLoss(torch.autograd.Function):
    """Adds a loss to the graph beside `x`, as Megatron's MoEAuxLossAutoScaler does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(())


class Block(nn.Module):
    """(B, T, WIDTH) -> (B, T, WIDTH): a residual two-layer perceptron, the ordinary layer of these modules."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        change: Tensor = self.dropout(self.narrow(F.gelu(self.widen(self.norm(hidden)))))
        return hidden + change


def block_list(count: int, dropout: float) -> nn.ModuleList:
    return nn.ModuleList(Block(dropout) for _ in range(count))


class BareParameterNet(nn.Module):
    """A model whose root owns parameters itself: a 0-dim scale before the blocks and a vector after them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))
        self.blocks = block_list(3, dropout)

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        hidden = inputs * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        prediction = hidden + self.shift
        return {"loss": F.mse_loss(prediction, targets), "prediction": prediction}


@dataclass
class CarriedState:
    """Crosses a block boundary in `SkipNet`; deliberately no registered pytree node."""

    hidden: Tensor
    memory: Tensor


class SplittingBlock(nn.Module):
    """A tensor in, a tuple out. Reads its input once, so the skip in `SkipNet` stays a two-term sum."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(hidden)
        return self.dropout(F.gelu(self.value(hidden))), torch.sigmoid(self.gate(hidden))


class NamingBlock(nn.Module):
    """A tuple in, a dict out; `memory` is the very tensor that came in."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = Block(dropout)

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        value, gate = pair
        return {"hidden": self.inner(value) * gate, "memory": gate}


class CarryingBlock(nn.Module):
    """A dict in, an unregistered dataclass out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = Block(dropout)
        self.remember = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: dict[str, Tensor]) -> CarriedState:
        return CarriedState(hidden=self.inner(parts["hidden"]), memory=torch.tanh(self.remember(parts["memory"])))


class MergingBlock(nn.Module):
    """A dataclass and a keyword argument in, both with gradients; a tensor out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = Block(dropout)
        self.recall = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: CarriedState, *, skip: Tensor) -> Tensor:
        hidden: Tensor = self.inner(state.hidden)
        recalled: Tensor = state.memory * self.recall(skip)
        return hidden + recalled


class SkipNet(nn.Module):
    """The input of block 1 returns in block 4 by keyword; a tuple, a dict and a dataclass cross the boundaries."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        kinds = (Block, SplittingBlock, NamingBlock, CarryingBlock, MergingBlock)
        self.blocks = nn.ModuleList(kind(dropout) for kind in kinds)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> NetOutput:
        first, splitting, naming, carrying, merging = self.blocks
        skip = first(inputs)
        state = carrying(naming(splitting(skip)))
        prediction = self.head(merging(state, skip=skip))
        return NetOutput(F.mse_loss(prediction, targets), prediction)


class SharedDepthNet(nn.Module):
    """One block is called four times. Returns the loss itself, a 0-dim tensor."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = block_list(1, dropout)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs
        for _ in range(4):
            hidden = self.blocks[0](hidden)
        return F.mse_loss(self.head(hidden), targets)


class NormalizedBlock(nn.Module):
    """A block whose BatchNorm updates its running statistics once for every forward, so not again for a recompute.

    Its output is a transposed view, and the bits of the next kernels depend on the strides: an engine gets the plain
    bits with `torch.autograd.grad`, not from the `.grad` of a leaf, which copies the gradient into the leaf's strides.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = Block(dropout)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        features_second = self.inner(hidden).transpose(1, 2)
        normalized: Tensor = self.norm(features_second)
        return normalized.transpose(1, 2)


class BatchNormNet(nn.Module):
    """Blocks with buffers that training changes, an integer one among them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormalizedBlock(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> NetOutput:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
        prediction = self.head(hidden)
        return NetOutput(F.mse_loss(prediction, targets), prediction)


class LayerDropNet(nn.Module):
    """A model that skips each block at random, four times as often as `dropout`, so that a short test sees skips.

    Micro-batches of one group then run different blocks, and a block that none of them ran has no gradient at all.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.skip_probability = min(4 * dropout, 0.9)
        self.blocks = block_list(4, dropout)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> NetOutput:
        hidden = inputs
        for block in self.blocks:
            if self.training and torch.rand([]) < self.skip_probability:
                continue
            hidden = block(hidden)
        prediction = self.head(hidden)
        return NetOutput(F.mse_loss(prediction, targets), prediction)


class Encoder(nn.Module):
    """(B, T, WIDTH) -> (B, WIDTH)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = block_list(3, dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.mean(dim=1)


class TwoPassNet(nn.Module):
    """One forward runs the same encoder over two views, then tells matching pairs from others."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encoder = Encoder(dropout)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, left: Tensor, right: Tensor) -> NetOutput:
        left_points = F.normalize(self.encoder(left), dim=-1)
        right_points = F.normalize(self.encoder(right), dim=-1)
        similarity = left_points @ right_points.T * self.temperature.exp()
        pairs = torch.arange(similarity.shape[0], device=similarity.device)
        return NetOutput(F.cross_entropy(similarity, pairs), similarity)


class PartlyUsedBlock(nn.Module):
    """A block with a layer that its forward ignores."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = Block(dropout)
        self.ignored = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = self.inner(hidden)
        return changed


class UntouchedNet(nn.Module):
    """A model with unused parameters: in each block, in a block never called, in the root. They must not move."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PartlyUsedBlock(dropout) for _ in range(4))
        self.unused_head = nn.Linear(WIDTH, WIDTH)
        self.unused_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor, targets: Tensor) -> NetOutput:
        hidden = inputs
        for position in (0, 1, 3):
            hidden = self.blocks[position](hidden)
        return NetOutput(F.mse_loss(hidden, targets), hidden)


class OutsideParameterNet(nn.Module):
    """The root reads `embed.weight` without calling `embed`, after the blocks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = block_list(3, dropout)

    def forward(self, words: Tensor, labels: Tensor) -> NetOutput:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden)
        scores = F.linear(hidden, self.embed.weight)
        return NetOutput(F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores)


class InPlaceNet(nn.Module):
    """A model that changes each block's output in place between the blocks; a cut there must not hand out a leaf."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = block_list(3, dropout)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> NetOutput:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
            hidden.add_(inputs)
        prediction = self.head(hidden)
        return NetOutput(F.mse_loss(prediction, targets), prediction)


def regression_batch(index: int) -> Batch:
    """(B, T, WIDTH) features and targets; T changes with the index."""
    generator = generator_of(index)
    shape = (2, ragged_length(index), WIDTH)
    return {"inputs": torch.randn(shape, generator=generator), "targets": torch.randn(shape, generator=generator)}


def two_view_batch(index: int) -> Batch:
    """Return two views of different lengths."""
    generator = generator_of(index)
    length = ragged_length(index)
    left = torch.randn(2, length, WIDTH, generator=generator)
    return {"left": left, "right": torch.randn(2, length - 1, WIDTH, generator=generator)}


def word_batch(index: int) -> Batch:
    generator = generator_of(index)
    length = ragged_length(index)
    return {"words": random_words(generator, length), "labels": random_words(generator, length)}


def module_family(net: Callable[[float], nn.Module], batch: Callable[[int], Batch], *, bitwise: bool) -> Family:
    return Family(net.__name__, lambda dropout: build_seeded(lambda: net(dropout)), batch, bitwise)


MODULES: tuple[Family, ...] = (
    module_family(BareParameterNet, regression_batch, bitwise=True),
    module_family(SkipNet, regression_batch, bitwise=True),
    module_family(SharedDepthNet, regression_batch, bitwise=False),  # four contributions to each parameter's gradient
    module_family(BatchNormNet, regression_batch, bitwise=True),
    module_family(LayerDropNet, regression_batch, bitwise=True),
    module_family(TwoPassNet, two_view_batch, bitwise=False),  # two contributions to each parameter's gradient
    module_family(UntouchedNet, regression_batch, bitwise=True),
    module_family(OutsideParameterNet, word_batch, bitwise=TIED),
    module_family(InPlaceNet, regression_batch, bitwise=True),
)
