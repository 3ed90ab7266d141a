"""What a model is made of, as plain frozen dataclasses; torch is not needed to read them."""

from dataclasses import dataclass, field

# Standard deviation of every freshly drawn embedding row (GPT-2, LLaMA practice).
EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class RopeConfig:
    """Settings of rotary position embedding; read only when `model.position` is `rope`."""

    theta: float = 10000.0
    """Base of the frequencies theta_k = base^(-2k/head_dim); larger turns the slow pairs slower."""

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise ValueError(f"model.rope.theta is {self.theta}: give a base above 1, such as 10000")


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
    """Position encoding, the one switch of a comparison: rope or sinusoidal."""
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
        for name in ("init_std", "embedding_rms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"model.{name} is {getattr(self, name)}: give a value above 0")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads
