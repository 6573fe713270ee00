"""Pruning of trees that another one beats whatever the widths are.

SENSEi (arXiv 2306.15155), section 4.3.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .rules import Primitive, Tree, steps

#: Numbers behind the names of sizes.
Sizes = Mapping[str, int]
#: True if only the first run calls it, a primitive's kind and its sizes, numbers where known.
_Counted: TypeAlias = tuple[str | int, ...]
#: Both orders of the widths; the numbers of vertices and entries are compared with themselves only.
ORDERS: tuple[Sizes, ...] = ({"in": 1, "out": 2}, {"in": 2, "out": 1})


@dataclass(frozen=True)
class Verdict:
    """The result of pruning for a tree: for each order None, or a tree that beats it."""

    tree: Tree
    beaten_by: tuple[Tree | None, ...]  #: for each order a tree that is better, if there is one

    @property
    def promoted(self) -> bool:
        """Return True if some order leaves the tree unbeaten."""
        return None in self.beaten_by


def signature(tree: Tree, *, training: bool = False) -> tuple[Primitive, ...]:
    """Return the primitives of the distinct steps, with their backward ones in training."""
    return tuple(primitive for _, primitive in _primitives(tree, training))


def _primitives(tree: Tree, training: bool) -> Iterator[tuple[bool, Primitive]]:
    """Yield the primitives of the distinct steps, each with True if only the first run calls it."""
    for step in steps(tree):
        yield from ((step.constant, primitive) for primitive in step.primitives(training))
        yield from ((e.first_only, e.primitive) for e in step.exchanges(training))


def judged(
    trees: Sequence[Tree], orders: Sequence[Sizes] = ORDERS, *, training: bool = False
) -> tuple[Verdict, ...]:
    """Compare each tree with all others under each order.

    A tree is beaten if another's primitives map one to one to some of its own, of the same kinds,
    each with sizes no larger, and the two are not equal.  One that runs at each call maps to none
    that runs once.
    """
    signatures = [tuple(_primitives(tree, training)) for tree in trees]
    beaters = [_beaters(signatures, sizes) for sizes in orders]
    return tuple(
        Verdict(tree, tuple(None if i is None else trees[i] for i in by_order))
        for tree, *by_order in zip(trees, *beaters, strict=True)
    )


def _beaters(
    signatures: Sequence[Sequence[tuple[bool, Primitive]]], sizes: Sizes
) -> list[int | None]:
    """Return for each signature the place of the first that beats it under these sizes, or None."""
    counted: dict[_Counted, int] = {}  # few primitives make up all trees: each gets a number
    numbers = [
        sorted(counted.setdefault(_counted(*entry, sizes), len(counted)) for entry in part)
        for part in signatures
    ]
    larger = [{j for b, j in counted.items() if _at_most(a, b)} for a in counted]

    def beats(ours: list[int], theirs: list[int]) -> bool:
        return ours != theirs and _fit([larger[i] for i in ours], theirs)

    return [
        next((i for i, ours in enumerate(numbers) if beats(ours, theirs)), None)
        for theirs in numbers
    ]


def _counted(first_only: bool, primitive: Primitive, sizes: Sizes) -> _Counted:
    """Return a primitive with numbers for those names of sizes that ``sizes`` has."""
    numbers = (int(name) if name.isdigit() else sizes.get(name, name) for name in primitive.size)
    return first_only, primitive.kind, *numbers


def _at_most(ours: _Counted, theirs: _Counted) -> bool:
    """Return True if the kinds agree, and no size is larger; names are equal or do not compare."""
    (first_only, *sizes), (theirs_first_only, *their_sizes) = ours, theirs
    if len(sizes) != len(their_sizes) or (theirs_first_only and not first_only):
        return False
    return all(
        a == b or (isinstance(a, int) and isinstance(b, int) and a < b)
        for a, b in zip(sizes, their_sizes, strict=True)
    )


def _fit(larger: Sequence[set[int]], theirs: Sequence[int]) -> bool:
    """Return True if each set in ``larger`` can be matched to a number of ``theirs`` of its own."""
    if len(larger) > len(theirs):
        return False
    taken: dict[int, int] = {}  # place among theirs -> ours

    def place(i: int, seen: set[int]) -> bool:
        for j, number in enumerate(theirs):
            if j not in seen and number in larger[i]:
                seen.add(j)
                if j not in taken or place(taken[j], seen):
                    taken[j] = i
                    return True
        return False

    return all(place(i, set()) for i in range(len(larger)))
