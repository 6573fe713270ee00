"""Leave out the trees that another one beats whatever the widths are.

SENSEi (arXiv 2306.15155), section 4.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .rules import Primitive, Tree, steps

#: Numbers behind the names of sizes.
Sizes = Mapping[str, int]
#: Both orders of the widths; the numbers of vertices and entries are compared with themselves only.
ORDERS: tuple[Sizes, ...] = ({"in": 1, "out": 2}, {"in": 2, "out": 1})


@dataclass(frozen=True)
class Verdict:
    """What became of a tree: under which orders it is promoted, and what beats it elsewhere."""

    tree: Tree
    beaten_by: tuple[Tree | None, ...]  #: for each order a tree that is better, if there is one

    @property
    def promoted(self) -> bool:
        """Whether some order leaves the tree unbeaten."""
        return None in self.beaten_by


def signature(tree: Tree, *, training: bool = False) -> tuple[Primitive, ...]:
    """Give the primitives of the distinct steps, with their backward ones in training."""
    return tuple(p for step in steps(tree) for p in step.primitives(training))


def judged(
    trees: Sequence[Tree], orders: Sequence[Sizes] = ORDERS, *, training: bool = False
) -> tuple[Verdict, ...]:
    """Compare each tree with all others under each order.

    A tree is beaten if another's primitives map one to one to some of its own, of the same kinds,
    each with sizes no larger, and the two are not equal.
    """
    signatures = {tree: signature(tree, training=training) for tree in trees}

    def beats(other: Tree, tree: Tree, sizes: Sizes) -> bool:
        ours, theirs = _counted(signatures[other], sizes), _counted(signatures[tree], sizes)
        return sorted(ours) != sorted(theirs) and _fit(ours, theirs)

    return tuple(
        Verdict(
            tree,
            tuple(
                next((other for other in trees if beats(other, tree, sizes)), None)
                for sizes in orders
            ),
        )
        for tree in trees
    )


def _counted(primitives: Sequence[Primitive], sizes: Sizes) -> list[tuple[str, ...]]:
    """Write sizes as numbers of equal length, where there are any, so that they sort."""
    return [(kind, *(_number(name, sizes) for name in size)) for kind, size in primitives]


def _number(name: str, sizes: Sizes) -> str:
    return f"{sizes[name]:020d}" if name in sizes else name


def _at_most(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Tell whether the kinds agree, and no size is larger; names are equal or do not compare."""
    return len(ours) == len(theirs) and all(
        a == b or (a.isdigit() and b.isdigit() and a < b) for a, b in zip(ours, theirs, strict=True)
    )


def _fit(ours: Sequence[tuple[str, ...]], theirs: Sequence[tuple[str, ...]]) -> bool:
    """Tell whether each of ours finds one of theirs for itself, at least as large."""
    if len(ours) > len(theirs):
        return False
    taken: dict[int, int] = {}  # theirs -> ours

    def place(i: int, seen: set[int]) -> bool:
        for j, other in enumerate(theirs):
            if j not in seen and _at_most(ours[i], other):
                seen.add(j)
                if j not in taken or place(taken[j], seen):
                    taken[j] = i
                    return True
        return False

    return all(place(i, set()) for i in range(len(ours)))
