"""Checkpoints of models that no process holds whole: each writes its own part, while training goes on.

checkpoints/step-0000500/shards/       weights and optimizer states, by torch.distributed.checkpoint
                         optimizer.pt  random states
                         state.json    everything else, with checksums

Any number of processes reads them, one without torchrun included.
"""

import pickle
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from model import checkpoint
from model.parallel import PATIENCE, Team
from model.transformer import Transformer


class ShardedSaves:
    """Writes one checkpoint at a time in the background; all processes call the same methods in the same order."""

    def __init__(self, team: Team) -> None:
        self.team = team
        # Training goes on talking to the others meanwhile, so this needs a channel of its own.
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.pool = ThreadPoolExecutor(1)
        self.running: Future[None] | None = None

    def wait(self) -> None:
        """Return when the checkpoint before is finished; OSError in all processes if one cannot write it."""
        running, self.running = self.running, None
        if not running:
            return
        error = running.exception()
        said = "" if error is None else (str(error).strip() or type(error).__name__).splitlines()[-1]
        if said := next(filter(None, self.team.collect(said)), ""):
            if self.team.first:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise OSError(f"cannot write a checkpoint: {said}") from error

    def save(
        self,
        folder: Path,
        model: Transformer,
        optimizers: list[torch.optim.Optimizer],
        others: dict[str, Any],
        state: dict[str, Any],
        then: Callable[[], None],
    ) -> None:
        """Copy what is to be saved, and write it in the background. Args as for checkpoint.save.

        Args:
            others: what else goes into optimizer.pt.
            then: called in the first process once the checkpoint is there.
        """
        self.wait()
        if self.team.from_first(checkpoint.is_there(folder, state["step"])):
            return
        temporary = self.temporary = checkpoint.half_made(folder, state["step"])
        if self.team.first:
            checkpoint.begin(folder, state["step"])
        self.team.wait()
        parts = {"model": model.state_dict(), "optimizers": get_optimizer_state_dict(model, optimizers)["state"]}
        written = dcp.async_save(parts, checkpoint_id=temporary / checkpoint.SHARDS, process_group=self.group)

        def finish() -> None:
            written.result()
            if self.team.first:
                torch.save(others, temporary / checkpoint.OPTIMIZER)
                checkpoint.finish(temporary, model, state)
                then()

        self.running = self.pool.submit(finish)


def read_weights(shards: Path, model: Transformer) -> None:
    """Copy weights into `model`, whole or spread. ValueError unless names and shapes agree exactly."""
    _read({"model": model.state_dict()}, shards)
    held = _Reader(shards).read_metadata().state_dict_metadata
    if more := {name for name in held if name.startswith("model.")} - {f"model.{name}" for name in model.state_dict()}:
        raise ValueError(f"{shards} holds what the model has not: {', '.join(sorted(more))}")


def read_optimizers(shards: Path, model: Transformer, optimizers: list[torch.optim.Optimizer]) -> None:
    """Copy states into the optimizers of `model`. ValueError unless they are there."""
    states = get_optimizer_state_dict(model, optimizers)
    _read({"optimizers": states["state"]}, shards)
    set_optimizer_state_dict(model, optimizers, states)


def _read(values: dict[str, Any], shards: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read as well
            dcp.load(values, storage_reader=_Reader(shards), planner=_TensorsOnly())
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        reason = str(error).strip() or type(error).__name__
        raise ValueError(f"{shards} cannot be read into this model: {reason.splitlines()[-1]}") from error


class _TensorsOnly(dcp.DefaultLoadPlanner):
    """Refuses what torch would unpickle without asking what it is."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError("it holds more than tensors")


class _Reader(dcp.FileSystemReader):
    """Reads .metadata, a pickle, without letting it run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (self.path / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        names = {path.name for path in self.path.iterdir()}
        if not names.issuperset(info.relative_path for info in metadata.storage_data.values()):
            raise ValueError("it names files that are elsewhere")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module.partition(".")[0], name) in {("pathlib", "PosixPath"), ("pathlib", "WindowsPath")}:
            return type(Path())
        known = {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        }
        parts = "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"
        known |= {
            (dcp.metadata.__name__, part)
            for part in (*parts, "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
        }
        if (module, name) in known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
