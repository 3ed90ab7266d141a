"""What a model is made of, as plain frozen dataclasses; torch is not needed to read them."""

from dataclasses import dataclass, field

# Standard deviation of every freshly drawn embedding row (GPT-2, LLaMA practice).
EMBEDDING_STD = 0.02


# How RoPE's frequencies can be stretched to longer contexts; the value says whether L0 must be known.
SCALING_KINDS = {"none": False, "linear": False, "ntk": False, "dynamic": True, "yarn": True, "llama3": True}


@dataclass(frozen=True)
class ScalingConfig:
    """How RoPE is stretched past the trained length, in training or on a trained model."""

    kind: str = "none"
    """none, linear (position interpolation), ntk, dynamic, yarn or llama3: docs/positions.md."""
    factor: float = 1.0
    """How many times longer than the trained length the context shall be, at least 1."""
    trained_length: int | None = None
    """L0 in tokens, for dynamic, yarn and llama3; null is the trained length of the checkpoint it is used on."""
    beta_fast: float = 32.0
    """yarn: pairs that turn at least so often within L0 keep their frequency."""
    beta_slow: float = 1.0
    """yarn: pairs that turn at most so often within L0 are slowed down by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: pairs that turn at least so often within L0 keep their frequency."""
    low_freq_factor: float = 1.0
    """llama3: pairs that turn at most so often within L0 are slowed down by the whole factor."""

    def __post_init__(self) -> None:
        key = "model.rope.scaling"
        if self.kind not in SCALING_KINDS:
            raise ValueError(f"{key}.kind is {self.kind!r}: choose one of {', '.join(SCALING_KINDS)}")
        if not 1 <= self.factor < float("inf"):
            raise ValueError(f"{key}.factor is {self.factor}: give 1 or more")
        if self.trained_length is not None and self.trained_length < 1:
            raise ValueError(f"{key}.trained_length is {self.trained_length}: give a number of tokens")
        for more, less in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
            if not 0 < getattr(self, less) < getattr(self, more):
                raise ValueError(f"{key}.{less} is {getattr(self, less)}: give a value between 0 and {key}.{more}")


@dataclass(frozen=True)
class RopeConfig:
    """Settings of rotary position embedding; read only when `model.position` is `rope`."""

    theta: float = 10000.0
    """Base of the frequencies theta_k = base^(-2k/head_dim); larger turns the slow pairs slower."""
    fraction: float = 1.0
    """Share of the pairs that turn, the fastest ones; the rest carry no position (p-RoPE)."""
    scaling: ScalingConfig = field(default_factory=ScalingConfig)

    def __post_init__(self) -> None:
        if not 1 < self.theta < float("inf"):
            raise ValueError(f"model.rope.theta is {self.theta}: give a base above 1, such as 10000")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"model.rope.fraction is {self.fraction}: give a value above 0 and up to 1")


@dataclass(frozen=True)
class SinusoidalConfig:
    """Settings of the absolute sinusoid; read only when `model.position` is `sinusoidal`."""

    ratio: float = 1.0
    """RMS of the added sinusoid over RMS of the token embeddings at initialisation."""

    def __post_init__(self) -> None:
        if self.ratio <= 0:
            raise ValueError(f"model.sinusoidal.ratio is {self.ratio}: give a value above 0")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a LLaMA-style decoder; the vocabulary size comes from the tokenizer."""

    position: str = "rope"
    """Position encoding, the one switch of a comparison: rope, sinusoidal, alibi or nope."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of blocks."""
    n_heads: int = 4
    """Query heads per attention layer; dim must be a multiple."""
    n_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); null means n_heads."""
    ffn_dim: int = 384
    """Inner width of SwiGLU."""
    window: int | None = None
    """Attention reaches only so many tokens back, itself included; null is all."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output head."""
    dropout: float = 0.0
    """Dropout on the embedding and on each branch before it joins the residual stream."""
    init_std: float = 0.02
    """Standard deviation of the matrices in the blocks; those that write to the residual stream are
    drawn at init_std / sqrt(2 n_layers)."""
    embedding_rms: float = EMBEDDING_STD
    """RMS at which token embeddings enter the first block at initialisation, in every encoding alike;
    the default 0.02 is plain LLaMA, 1.0 is unit RMS, 0.02 sqrt(dim) is the scaling of Vaswani et al."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    sinusoidal: SinusoidalConfig = field(default_factory=SinusoidalConfig)

    def __post_init__(self) -> None:
        from model.positions import ENCODINGS

        for name in ("dim", "n_layers", "n_heads", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}: give a whole number above 0")
        if self.position not in ENCODINGS:
            raise ValueError(f"model.position is {self.position!r}: choose one of {', '.join(ENCODINGS)}")
        if self.dim % self.n_heads:
            raise ValueError(f"model.dim {self.dim} is not a multiple of model.n_heads {self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"model.dim {self.dim} over model.n_heads {self.n_heads} gives an odd head dim of "
                f"{self.head_dim}: rotary pairs need it even"
            )
        if self.kv_heads < 1 or self.n_heads % self.kv_heads:
            raise ValueError(f"model.n_heads {self.n_heads} is not a multiple of model.n_kv_heads {self.kv_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout is {self.dropout}: give a value in [0, 1)")
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.window is {self.window}: give a number of tokens, or null for all")
        scaling = self.rope.scaling.kind
        if scaling != "none" and self.position != "rope":
            raise ValueError(
                f"model.rope.scaling.kind is {scaling}, but model.position is {self.position}: only rope stretches"
            )
        if scaling in ("ntk", "dynamic") and self.head_dim < 4:
            raise ValueError(f"model.rope.scaling.kind {scaling} needs a head dim of 4 or more, not {self.head_dim}")
        for name in ("init_std", "embedding_rms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"model.{name} is {getattr(self, name)}: give a value above 0")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads
