"""The machine a model runs on: device, precision, random state, and how its memory is handled."""

import ctypes
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def choose_device(name: str) -> torch.device:
    """The device asked for; auto takes cuda, then mps, then cpu. ValueError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}: give auto, cpu, mps, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name}, but torch sees {torch.cuda.device_count()} CUDA devices: use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device is mps, but torch sees none here: use auto or cpu")
    return device


def name_device(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device} ({name}, {torch.get_num_threads()} threads)"


def choose_autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Autocast to bf16, or nothing. ValueError for bf16 on a CPU, where it can be 200 times slower than fp32."""
    if precision == "bf16" and device.type == "cpu":
        raise ValueError("train.precision is bf16, which is far slower than fp32 on a CPU: use auto or fp32")
    # Compute capability 8.0 is the first with bf16 matrix units.
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    use = precision == "bf16" or (precision == "auto" and fast)
    return torch.autocast(device.type, torch.bfloat16) if use else nullcontext()


def compiled_or_plain(model: torch.nn.Module) -> Callable[..., Tensor]:
    """A compiled form of `model`; where nothing can be compiled it says so once and goes on without."""
    forward = torch.compile(model)

    def call(*inputs: Tensor, **named: Tensor) -> Tensor:
        nonlocal forward
        try:
            return forward(*inputs, **named)
        except RuntimeError as error:
            # Not torch._dynamo's class, which takes a second to import: a second Ctrl-C comes by here too.
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            reason = " ".join(str(error).split())[:200]
            print(f"warning: torch.compile fails ({reason}); going on without it", file=sys.stderr)
            forward = model
            return model(*inputs, **named)

    return call


def backward_by_hand(x: Tensor) -> bool:
    """Whether layers use backward passes of their own: on a CPU, where no compiler writes better ones."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.dtype in (torch.float32, torch.float64)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of the generators that dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of giving it back to the system after every large tensor, in huge pages.

    The next tensor then finds pages that are there already; without this the system clears fresh ones each time. A
    training step walks through tens of megabytes, and the processor remembers where some thousand pages are: of 4 kB
    those are a few megabytes, of 2 MB all there is. Does nothing where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # noqa: N806, their names in malloc.h
    MADV_HUGEPAGE, PAGE = 14, 2**21  # noqa: N806
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)  # never
    # Huge pages are had by asking before memory is used: so the heap takes 2 GB of addresses, which cost nothing, at once.
    mallopt(M_TOP_PAD, 2**31 - 2 * PAGE)
    before = libc.sbrk(0)
    libc.free(libc.malloc(2 * PAGE))
    start = -(-before // PAGE) * PAGE
    if (size := libc.sbrk(0) - start) > 0:
        libc.madvise(start, size, MADV_HUGEPAGE)
    mallopt(M_TOP_PAD, 64 * 2**20)
