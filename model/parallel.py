"""Several processes that train one model: which part each does, and what they tell each other.

`torchrun --nproc_per_node N train.py ...` starts N of them. Every step they share one batch, so that batches, losses
and schedule are those of a single process. With ddp each holds the whole model and gradients are averaged; with fsdp
weights, gradients and optimizer state are spread over all (FSDP2, `fully_shard`).
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.transformer import Transformer

T = TypeVar("T")
# While one process prepares data or writes a checkpoint, the others wait so long.
PATIENCE = timedelta(hours=2)


class Team:
    """The processes of this run, seen from one of them; a team of one needs no torchrun.

    Args:
        device: the device asked for; `cuda` becomes the GPU of this process.

    Attributes: `rank` of `size` processes, `local_rank` on this machine, `device`, and whether the model is `sharded`.

    Raises:
        ValueError: several processes on a device that cannot be shared out.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.local_rank, self.size = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
        )
        self.device = device
        self.wrapped: Any = None
        self.sharded = False
        if self.size == 1:
            return
        if device.type == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise ValueError(
                    f"process {self.local_rank} of this machine has no GPU, for torch sees {torch.cuda.device_count()}: "
                    "start fewer with --nproc_per_node"
                )
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        elif device.type != "cpu":
            raise ValueError(f"device is {device}: several processes need cuda or cpu")
        shares = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.first and shares and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
            # https://github.com/pytorch/pytorch/issues/135712
            print(
                "warning: after a restart torchrun can hang on addresses of processes that died; "
                "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
                file=sys.stderr,
            )
        backend = "nccl" if device.type == "cuda" else "gloo"
        # Python hears no signal while it waits for the others, and torchrun would wait half a minute for its end.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dist.init_process_group(backend, timeout=PATIENCE, device_id=self.device if backend == "nccl" else None)
        signal.signal(signal.SIGTERM, handler)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def restarted(self) -> bool:
        """Whether torchrun has started the processes again after one of them died; every process must ask."""
        # The torchrun of each host counts the deaths on its own host alone.
        return self.largest(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))) > 0

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            dist.barrier()

    def from_first(self, value: T) -> T:
        """The first process's value."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def collect(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def largest(self, value: int) -> int:
        """The largest value of all processes."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def share(self, windows: Any) -> Any:
        """This process's part of a step's windows, whose number the size of the team divides."""
        each = len(windows) // self.size
        return windows[self.rank * each : (self.rank + 1) * each]

    def portion(self, starts: Any) -> tuple[Any, int]:
        """This process's part of windows to be scored, and how many of it count.

        All get equally many, since with fsdp all must call the model equally often: at the end the first again.
        """
        each = -(-len(starts) // self.size)
        own = list(range(len(starts)))[self.rank * each : (self.rank + 1) * each]
        return starts[own + [0] * (each - len(own))], len(own)

    def same_logits(self, model: Transformer) -> Callable[..., Tensor]:
        """A sharded model's last_logits, those of the first process for all, so that all choose the same tokens."""

        def forward(*inputs: Any) -> Tensor:
            logits = model.last_logits(*inputs)
            dist.broadcast(logits, 0)
            return logits

        return forward

    def spread(self, model: Transformer, parallel: Literal["auto", "ddp", "fsdp"], bf16: bool) -> nn.Module:
        """Put a model, alike in all processes, into the form that is called in training.

        fsdp changes `model` itself: its parameters become DTensors, so make the optimizer afterwards.

        Args:
            bf16: with fsdp, compute and send weights in bf16; sums of gradients stay in fp32.
        """
        if self.size == 1:
            return model
        if parallel != "fsdp":
            # On CPUs nothing is gained by sending early what is ready early, and every message costs.
            bucket = {} if self.device.type == "cuda" else {"bucket_cap_mb": 25}
            self.wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **bucket)
            return self.wrapped
        # Imported where it is used: half a second that a run on one process need not wait.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        self.sharded = True
        mesh = init_device_mesh(self.device.type, (self.size,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.wrapped = fully_shard(model, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(model, "hidden_states")  # what scoring and generation call
        return self.wrapped

    def accumulating(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch: gradients are exchanged with the last one of a step only."""
        if isinstance(self.wrapped, nn.parallel.DistributedDataParallel):
            # It looks in the forward pass whether to exchange: setting that before backward alone comes too late.
            return nullcontext() if last else self.wrapped.no_sync()
        if self.wrapped is not None:
            self.wrapped.set_requires_gradient_sync(last)
        return nullcontext()

    def whole(self, model: Transformer) -> Transformer:
        """`model`, or with fsdp a copy in one piece, on the CPU of the first process; every process must take part."""
        if not self.sharded:
            return model
        weights = whole_tensors(model.state_dict())
        if not self.first:
            return model
        with torch.device("meta"):
            copy = Transformer(model.config, model.vocab_size)
        copy.load_state_dict(weights, assign=True)
        return copy

    def leave(self) -> None:
        """Say goodbye to the others."""
        if self.size > 1:
            dist.destroy_process_group()


def is_spread(value: Any) -> bool:
    """Whether a tensor is a DTensor, of which this process holds a part."""
    return hasattr(value, "full_tensor")


def whole_tensors(values: Any) -> Any:
    """Nested values with every DTensor put together, on the CPU of the first process and None elsewhere.

    Every process must take part.
    """
    if isinstance(values, dict):
        return {key: whole_tensors(value) for key, value in values.items()}
    if not is_spread(values):
        return values
    whole = values.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else None


def spread_like(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Optimizer state of one parameter, its tensors spread over the processes as the parameter is."""
    if not is_spread(parameter):
        return state
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return {
        name: distribute_tensor(value.to(parameter.device), mesh, placements)
        if torch.is_tensor(value) and value.shape == parameter.shape
        else value
        for name, value in state.items()
    }
