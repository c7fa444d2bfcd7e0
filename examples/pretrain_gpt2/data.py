"""Text in, micro-batches out: the data of this example, found without a download.

The default text is the shortened English Wikipedia dump inside the gensim wheel (CC BY-SA), cleaned of its markup; any
local text files do as well. A byte-level BPE is trained on the text once, and kept with the token ids in the user's
cache directory under the hash of the text. Nothing here knows the engine.
"""

from __future__ import annotations

import bz2
import hashlib
import html
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from tokenizers import ByteLevelBPETokenizer

END_OF_TEXT = "<|endoftext|>"
_CACHE_FORMAT = "1"
_MIN_PARAGRAPH_CHARACTERS = 80
_TEMPLATE_OR_TABLE = r"\{\{[^{}]*\}\}|\{\|(?:(?!\{\||\|\}).)*\|\}"
_FILE_OR_CATEGORY_LINK = r"\[\[(?:File|Image|Category|[a-z-]{2,12}):(?:(?!\[\[|\]\]).|\[\[(?:(?!\]\]).)*\]\])*\]\]"


class DataError(Exception):
    """The text cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A tokenized text. `token_ids` is 1-D int64; documents are separated by the end-of-text token."""

    token_ids: torch.Tensor
    vocab_size: int
    source: str

    def split(self, held_out: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (training, held-out) token ids; the held-out part is the last `held_out` of the text."""
        boundary = int(len(self.token_ids) * (1.0 - held_out))
        return self.token_ids[:boundary], self.token_ids[boundary:]


def load_corpus(text_files: Sequence[Path] = (), vocab_size: int = 2048) -> Corpus:
    """Read and tokenize `text_files` (plain text, or Wikipedia's XML as .bz2), or gensim's articles when there are none.

    Raises:
        DataError: a file or gensim is missing, or the text is empty.
    """
    documents = _read_text_files(text_files) if text_files else _read_wikipedia(wikipedia_dump())
    if not documents:
        raise DataError("the text is empty: give files with some prose in them (--text FILE)")
    directory = _cache_directory(documents, vocab_size)
    tokenizer = _tokenizer(documents, vocab_size, directory)
    token_ids = _token_ids(documents, tokenizer, directory)
    name = ", ".join(file.name for file in text_files) or "Wikipedia articles (gensim)"
    source = f"{name}: {len(documents)} documents, {len(token_ids):,} tokens"
    return Corpus(token_ids, tokenizer.get_vocab_size(), source)


def micro_batches(
    token_ids: torch.Tensor, micro_batch_size: int, sequence_tokens: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches {input_ids, labels} of shape (micro_batch_size, sequence_tokens) without end.

    The text is cut into sequences, which are shuffled anew each epoch. The shuffle has a generator of its own: the
    order depends on `seed` only, and drawing from it leaves other random numbers alone. Labels equal the inputs,
    the model shifts them.
    """
    count = len(token_ids) // sequence_tokens
    if count < micro_batch_size:
        raise DataError(
            f"the text is too short: a micro-batch needs {micro_batch_size} sequences of {sequence_tokens} tokens, "
            f"and {len(token_ids)} tokens make {count}: give more text (--text FILE)"
        )
    sequences = token_ids[: count * sequence_tokens].view(count, sequence_tokens)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - micro_batch_size + 1, micro_batch_size):
            input_ids = sequences[order[start : start + micro_batch_size]]
            yield {"input_ids": input_ids, "labels": input_ids.clone()}


def clean_wikitext(text: str) -> str:
    """Return the prose paragraphs of one article: no templates, tables, references, links or headings."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<(ref|math|gallery|timeline|pre|source)\b[^>/]*>.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", "", text)
    text = _remove_nested(r"\{\{[^{}]*\}\}|\{\|(?:(?!\{\||\|\}).)*\|\}", text)
    text = _remove_nested(
        r"\[\[(?:File|Image|Category|[a-z-]{2,12}):(?:(?!\[\[|\]\]).|\[\[(?:(?!\]\]).)*\]\])*\]\]", text
    )
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[(?:https?|ftp)://\S*\s?([^\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r"[ \t]+", " ", html.unescape(text).replace("\xa0", " "))
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if len(line) >= _MIN_PARAGRAPH_CHARACTERS and line[0] not in "|!=*#:;{}")


def _remove_nested(pattern: str, text: str) -> str:
    """Remove what `pattern` matches, innermost first, until nothing does."""
    matches = 1
    while matches:
        text, matches = re.subn(pattern, "", text, flags=re.DOTALL)
    return text


def wikipedia_dump() -> Path:
    """Return the shortened English Wikipedia in the gensim package, as XML.

    Raises:
        DataError: gensim is not installed, or comes without it.
    """
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise DataError(
            "the default text comes with the gensim package, which is not installed: "
            'pip install ".[examples]", or give a text of your own (--text FILE)'
        )
    folder = Path(spec.origin).parent / "test" / "test_data"
    dumps = sorted(folder.glob("enwiki-latest-pages-articles1*shortened.bz2"))
    if not dumps:
        raise DataError(f"gensim is installed without its Wikipedia articles ({folder}): give a text (--text FILE)")
    return dumps[0]


def _read_wikipedia(dump: Path) -> list[str]:
    """Return the cleaned articles of a MediaWiki XML dump; redirects and pages that are no articles are left out."""
    articles = []
    with bz2.open(dump) as stream:
        for _, element in ElementTree.iterparse(stream):
            if not element.tag.endswith("}page"):
                continue
            if element.findtext("{*}ns") == "0" and element.find("{*}redirect") is None:
                articles.append(clean_wikitext(element.findtext("{*}revision/{*}text") or ""))
            element.clear()
    return [article for article in articles if article]


def _read_text_files(files: Sequence[Path]) -> list[str]:
    for file in files:
        if not file.is_file():
            raise DataError(f"no such text file: {file}")
    documents = [article for file in files if file.suffix == ".bz2" for article in _read_wikipedia(file)]
    plain = [str(file) for file in files if file.suffix != ".bz2"]
    return documents + (_read_plain(plain) if plain else [])


def _read_plain(files: list[str]) -> list[str]:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    rows = load_dataset("text", data_files=files, sample_by="document", split="train")
    return [text for text in rows["text"] if text.strip()]


def _cache_directory(documents: Sequence[str], vocab_size: int) -> Path:
    """Return the folder that belongs to this text and vocabulary: the same words, wherever they came from."""
    digest = hashlib.sha256(f"{_CACHE_FORMAT} {vocab_size}".encode())
    for document in documents:
        digest.update(b"\0" + document.encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "harmony_ds" / "pretrain_gpt2" / digest.hexdigest()[:20]
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _tokenizer(documents: Sequence[str], vocab_size: int, directory: Path) -> ByteLevelBPETokenizer:
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if not (vocab.exists() and merges.exists()):
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(documents, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            for file in trained.save_model(scratch):
                os.replace(file, directory / Path(file).name)
    return ByteLevelBPETokenizer.from_file(str(vocab), str(merges))


def _token_ids(documents: Sequence[str], tokenizer: ByteLevelBPETokenizer, directory: Path) -> torch.Tensor:
    file = directory / "token_ids.pt"
    if not file.exists():
        separator = tokenizer.token_to_id(END_OF_TEXT)
        encoded = tokenizer.encode_batch(list(documents))
        token_ids = torch.tensor([token for document in encoded for token in (*document.ids, separator)])
        scratch = file.with_suffix(f".{os.getpid()}")
        torch.save(token_ids, scratch)
        os.replace(scratch, file)
    loaded: torch.Tensor = torch.load(file, weights_only=True)
    return loaded
