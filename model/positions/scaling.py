"""How RoPE's frequencies are stretched so that a model reads further than it was trained.

L0 is the trained length, s the factor, d the head dim, theta_k the frequency of pair k. A pair that has
turned many times within L0 knows distances from every angle; one that has not finished a turn meets new
angles past L0. All kinds slow down the slow pairs; they differ in what they do to the fast ones.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from model.config import ScalingConfig


def scaled_frequencies(
    plain: Float[Tensor, "pairs"], theta: float, scaling: ScalingConfig, length: Int[Tensor, "batch"] | None
) -> Float[Tensor, "pairs"] | Float[Tensor, "batch pairs"]:
    """Stretch the frequencies `plain` of base `theta`; pairs that stand still stay so.

    Args:
        plain: radians per position of each pair, from rope_frequencies.
        theta: the base they were made from.
        scaling: kind and parameters.
        length: tokens of each row so far; needed for dynamic alone.

    Returns one set of frequencies, or for dynamic one a row. ValueError where L0 is needed and not given.
    """
    factor, head_dim = scaling.factor, 2 * len(plain)
    match scaling.kind:
        case "none":
            return plain
        case "linear":
            # Position interpolation: Chen et al. 2023, https://arxiv.org/abs/2306.15595, equation 4.
            return plain / factor
        case "ntk":
            # bloc97 2023, "NTK-aware scaled RoPE": base' = base s^(d/(d-2)) leaves pair 0 alone and slows the last by s.
            return _with_larger_base(plain, torch.tensor(factor, dtype=plain.dtype))
        case "dynamic":
            # emozilla 2023: the same, growing with the length l: base' = base (s l/L0 - (s - 1))^(d/(d-2)) past L0.
            grown = factor * length.to(plain.dtype) / trained_length(scaling) - (factor - 1)
            return _with_larger_base(plain, grown.clamp(min=1)[:, None])
        case "yarn":
            slowed = _yarn_ramp(head_dim, theta, scaling).to(plain)
        case "llama3":
            # Llama 3.1 (Dubey et al. 2024): theta is kept where more than `high` turns fit into L0, stretched below `low`.
            turns = trained_length(scaling) * plain / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            slowed = 1 - ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (1 - slowed) + plain / factor * slowed


def _with_larger_base(plain: Float[Tensor, "pairs"], growth: Tensor) -> Tensor:
    """Frequencies of the base times growth^(d/(d-2)): pair k is slowed by growth^(2k/(d-2))."""
    pairs = len(plain)
    return plain * growth ** (-torch.arange(pairs, dtype=plain.dtype, device=plain.device) / (pairs - 1))


def _yarn_ramp(head_dim: int, theta: float, scaling: ScalingConfig) -> Float[Tensor, "pairs"]:
    """0 for pairs that keep their frequency, 1 for those slowed down by the factor, linear in the pair between.

    Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2, in the form that is deployed: the ramp
    runs over pair indices. The paper's equation 18 runs it over the number of turns within L0, which gives
    up to 70% other frequencies between the two ends.
    """
    length = trained_length(scaling)

    def pair(turns: float) -> float:
        """The pair, as a real number, that turns so often within L0."""
        return head_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    first = max(math.floor(pair(scaling.beta_fast)), 0)
    last = min(math.ceil(pair(scaling.beta_slow)), head_dim - 1)
    width = max(last - first, 0.001)  # a step where both fall on one pair
    return ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / width).clamp(0, 1)


def attention_factor(scaling: ScalingConfig) -> float:
    """What cos and sin are multiplied by: 0.1 ln s + 1 for yarn (equation 22), which sharpens attention; else 1."""
    return 0.1 * math.log(scaling.factor) + 1 if scaling.kind == "yarn" else 1.0


def trained_length(scaling: ScalingConfig) -> int:
    """L0; ValueError where it was not given."""
    if scaling.trained_length is None:
        raise ValueError(f"model.rope.scaling.kind {scaling.kind} needs model.rope.scaling.trained_length")
    return scaling.trained_length
