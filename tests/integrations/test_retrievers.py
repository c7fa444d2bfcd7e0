"""sentence-transformers' Trainer under HarmonyMixin: losses over all rows, of which no layer call holds all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import BertConfig, BertModel, BertTokenizerFast, DistilBertConfig, DistilBertModel

from harmony_ds import ModelError, OptimizerError
from harmony_ds.integrations.transformers import HarmonyMixin

pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:sentence_transformers"),
    pytest.mark.filterwarnings("ignore:The MultipleNegativesSymmetricRankingLoss is deprecated:DeprecationWarning"),
]

sentence_transformers = pytest.importorskip("sentence_transformers")
losses = pytest.importorskip("sentence_transformers.losses")
models = pytest.importorskip("sentence_transformers.models")

ROWS, STEPS = 24, 2
WORDS = [f"w{number}" for number in range(40)]
SMALLEST = {"residency": "off", "pack_layers": 1, "stash": "host"}


def bert(words: int) -> Any:
    config = BertConfig(
        vocab_size=words,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertModel(config)


def distilbert(words: int) -> Any:
    config = DistilBertConfig(
        vocab_size=words,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return DistilBertModel(config)


def encoder(folder: Path, transformer_of: Callable[[int], Any] = bert) -> Any:
    """Return an encoder of two layers without dropout, with its tokenizer and mean pooling."""
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab_file=str(vocabulary))
    torch.manual_seed(0)
    transformer_of(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformer = models.Transformer(str(folder), max_seq_length=16)
    pooling = models.Pooling(transformer.get_embedding_dimension())
    return sentence_transformers.SentenceTransformer(modules=[transformer, pooling], device="cpu")


def pairs() -> Dataset:
    source = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=source).tolist())

    return Dataset.from_list([{"anchor": text(5 + i % 3), "positive": text(8 + i % 4)} for i in range(ROWS * STEPS)])


class Ours(HarmonyMixin, sentence_transformers.SentenceTransformerTrainer):  # type: ignore[misc, name-defined]
    """The Trainer of sentence-transformers over the engine."""


def trained(
    kind: Any,
    name: str,
    folder: Path,
    harmony: dict[str, Any] | None = None,
    transformer_of: Callable[[int], Any] = bert,
    **of_loss: Any,
) -> Any:
    """Train with the loss `name`; return the trainer."""
    folder.mkdir(exist_ok=True)
    model = encoder(folder, transformer_of)
    if name == "MatryoshkaLoss":
        of_loss |= {"loss": losses.MultipleNegativesRankingLoss(model), "matryoshka_dims": [32, 16, 8]}
    trainer = kind(
        model=model,
        args=sentence_transformers.SentenceTransformerTrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=ROWS,
            max_steps=STEPS,
            learning_rate=0.1,
            optim="sgd",
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=pairs(),
        loss=getattr(losses, name)(model, **of_loss),
        **({} if harmony is None else {"ds_config": {"harmony": {"device": "cpu", **harmony}}}),
    )
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return dict(trainer.model.state_dict())


@pytest.mark.parametrize(
    ("name", "transformer_of"),
    [
        ("MultipleNegativesRankingLoss", bert),
        ("MultipleNegativesSymmetricRankingLoss", distilbert),
        ("MatryoshkaLoss", distilbert),
    ],
)
def test_in_batch_negatives_are_cut_where_they_do_not_fit(
    name: str, transformer_of: Callable[[int], Any], tmp_path: Path
) -> None:
    given: Any = {"transformer_of": transformer_of}
    plain = weights(trained(sentence_transformers.SentenceTransformerTrainer, name, tmp_path / "plain", **given))
    whole = trained(Ours, name, tmp_path / "whole", SMALLEST, **given)
    assert all(torch.equal(value, plain[key]) for key, value in weights(whole).items())
    budget = whole.harmony_engine.memory_report().planned_peak_bytes // 2
    ours = trained(Ours, name, tmp_path / "ours", {"device_memory_gib": budget / 2**30}, **given)
    engine = ours.harmony_engine
    assert 0 < engine.plan.policy.backward_rows < ROWS
    assert engine.memory_report().device_peak_bytes <= budget
    assert engine.swap_report().ratio <= 1.0
    largest = max(value.norm() for value in plain.values())
    for key, value in weights(ours).items():  # biases of keys have no gradient but rounding
        assert (value - plain[key]).norm() <= 1e-5 * plain[key].norm() + 1e-7 * largest, key


def test_a_frozen_guide_is_run_beside_the_model(tmp_path: Path) -> None:
    found = []
    for kind, harmony in ((sentence_transformers.SentenceTransformerTrainer, None), (Ours, {})):
        guide = encoder(tmp_path).requires_grad_(False)
        found.append(weights(trained(kind, "GISTEmbedLoss", tmp_path, harmony, guide=guide)))
    assert all(torch.equal(value, found[0][key]) for key, value in found[1].items())


def test_a_guide_that_is_not_frozen_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(OptimizerError, match=r"guide\.requires_grad_\(False\)"):
        trained(Ours, "CachedGISTEmbedLoss", tmp_path, {}, guide=encoder(tmp_path), mini_batch_size=4)


@pytest.mark.parametrize("name", ["CachedMultipleNegativesRankingLoss", "CachedGISTEmbedLoss"])
def test_losses_that_cut_rows_themselves_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    guided = {"guide": encoder(tmp_path).requires_grad_(False)} if "GIST" in name else {}
    with pytest.raises(ModelError, match=r"take the one that is not cached.*docs/retrievers\.md"):
        trained(Ours, name, tmp_path, {}, mini_batch_size=4, **guided)
