"""What ``optimize`` decided for a model: compositions, vertices, tiles, kernels, capture."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module

from ..graph.graph import Graph
from ..ops.engine.explain import Explanation, explaining
from ..plan.planner import Plan
from ..plan.rules import bare
from .composition import Composition, Settings
from .decisions import Ordering
from .launching import Launching
from .layers import PlannedLayer
from .tiling import Tiling
from .trace import FAILURES, TracedForward, running


@dataclass(frozen=True, repr=False)
class ModelPlan:
    """The plans of a model's layers; ``print`` it, or ``explain()`` each composition."""

    model: Module
    compositions: Mapping[str, Composition] = field(default_factory=dict)
    ordering: Ordering | None = None  #: of the vertices, where ``steps`` and ``x`` were given
    tiling: Tiling | None = None  #: likewise, of the format
    launching: Launching | None = None  #: likewise, whether to capture the step
    training: bool = False  #: whether it was planned for
    given: tuple[Any, ...] = ()  #: weak references to what the model was called with

    @property
    def layers(self) -> dict[str, Plan]:
        """The latest plan of each layer, by its name, and of each product between layers.

        Of those for training or inference, whichever was asked for, if there is one.
        """
        found = {}
        for name, composition in self.compositions.items():
            planned = tuple(composition.plans.copy().values())  # calls reorder them
            plans = [made.plan for made in planned if made.plan]
            asked = [plan for plan in plans if plan.training == self.training]
            if plans:
                found[name] = (asked or plans)[-1]
        return found

    def explain(self) -> str:
        """Write every composition of every layer, its costs, and what was chosen.

        Runs the model once for the kernels of its products, if ``x`` is still there.
        """
        if not self.layers:
            return "no layer was planned: the model runs as it did"
        parts = [f"{name or 'model'}: {plan.explain()}" for name, plan in self.layers.items()]
        parts += [one.explain() for one in (self.ordering, self.tiling, self.launching) if one]
        try:
            kernels = self.kernels()
        except FAILURES as error:
            parts.append(f"kernels: the model does not run as it did when it was planned ({error})")
        else:
            parts += ["\n".join(["kernels of a forward:", *map(str, kernels)])] if kernels else []
        return "\n\n".join(parts)

    def __str__(self) -> str:
        lines = [f"{name or 'model'}: {bare(p.chosen.tree)}" for name, p in self.layers.items()]
        lines += [f"order of vertices: {self.ordering.reason}"] if self.ordering else []
        lines += [f"tiles: {self.tiling.reason}"] if self.tiling else []
        lines += [f"capture: {self.launching.reason}"] if self.launching else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<plan of {type(self.model).__name__}: {str(self) or 'nothing'}>"

    def kernels(self) -> tuple[Explanation, ...]:
        """Run the model once, and explain which kernels the products of its forward ran.

        None without ``x``, once what the model was called with is gone, or after ``restore``.
        """
        given = [one() if isinstance(one, ref) else one for one in self.given]
        if not given or any(one is None for one in given) or not planned_in(self.model):
            return ()
        with running(self.model, training=self.training), explaining() as found:
            self.model(*given)
        return tuple({str(one): one for one in found}.values())

    def restore(self) -> None:
        """Make the model run as it did before, and drop the tiles that were built for it."""
        for module in planned_in(self.model):
            settings = _settings_of(module)
            if any(made.settings is settings for made in self.compositions.values()):
                del module.forward
        if self.tiling is not None:
            self.tiling.undo()


def planned_in(model: Module) -> list[Module]:
    """Give the parts of a model whose forward is a planned one."""
    planned = PlannedLayer, TracedForward
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), planned)]


def _settings_of(module: Module) -> Settings:
    """Give the settings of the plan that a part of a model runs."""
    forward: Any = module.forward
    found: Settings = (
        forward.settings if isinstance(forward, TracedForward) else (forward.composition.settings)
    )
    return found


def weakly(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let go of tensors and graphs when the caller does; nothing of what holds them elsewhere."""
    if all(isinstance(one, Tensor | Graph | int | float | str | None) for one in given):
        return tuple(ref(one) if isinstance(one, Tensor | Graph) else one for one in given)
    return ()
