"""Position encodings, one file each. A new encoding is a new file and a new line in ENCODINGS."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.positions.base import PositionEncoding

# Where each encoding lives; imported on first use, so that settings can be checked without torch.
ENCODINGS: dict[str, str] = {
    "rope": "model.positions.rope.Rotary",
    "sinusoidal": "model.positions.sinusoidal.Sinusoidal",
    "alibi": "model.positions.alibi.ALiBi",
    "nope": "model.positions.nope.NoPE",
}


def encoding_class(name: str) -> "type[PositionEncoding]":
    """Return the class registered under `name`; KeyError if there is none."""
    module, _, cls = ENCODINGS[name].rpartition(".")
    return getattr(import_module(module), cls)
