"""Options of a training, as the command line has them.  Nothing here needs torch."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODELS = ("gcn", "sage", "gat", "maxk")


@dataclass(frozen=True)
class Options:
    """Options of a training."""

    model: str = "gcn"
    hidden: int = 256
    layers: int = 3
    heads: int = 4  #: of gat's hidden layers
    k: int = 32  #: of maxk: features of each vertex that a layer keeps
    epochs: int = 100
    lr: float = 0.01
    weight_decay: float = 0.0
    dropout: float = 0.5
    seed: int = 0
    dtype: str = "float32"
    checkpoint: Path | None = None
    every: int = 10
    resume: bool = False

    def shape(self) -> dict[str, Any]:
        """Return the options that a checkpoint must have alike."""
        names = ["model", "hidden", "layers", "seed", "dtype"]
        names += [name for name, of in (("heads", "gat"), ("k", "maxk")) if self.model == of]
        return {name: asdict(self)[name] for name in names}
