"""Every way to compute an expression: trees of an interval dynamic programme over its chains.

SENSEi (arXiv 2306.15155), section 4.2.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import prod

from .expression import Apply, Expression, Hop, Leaf, Product, Sum, factored, hops, simplified
from .pruning import judged
from .rules import FUSED, Applied, Rule, Step, Tree, addition, application

#: Sums with more combinations of their terms' trees associate all terms alike.
MAX_COMBINATIONS = 64
#: What a hop is composed for.
_X = Leaf("X", "dense", "n", "feat", grad=True)


def forest(expression: Expression, rules: Sequence[Rule] = FUSED) -> tuple[Tree, ...]:
    """Give the distinct trees that compute the expression, or its factored form.

    Each hop is composed in every way that no other beats, and alike wherever it occurs.
    """
    plain = simplified(expression)
    found: dict[Tree, None] = {}
    for chosen in product(*(_compositions(hop, rules) for hop in hops(plain))):
        forester = _Forester(rules, dict(zip(hops(plain), chosen, strict=True)))
        for form in dict.fromkeys((plain, factored(plain))):
            found |= dict.fromkeys(forester.trees(form))
    return tuple(found)


def _compositions(hop: Hop, rules: Sequence[Rule]) -> list[Tree]:
    trees = _Forester(rules, {}).trees(Product((*hop.factors, _X)))
    return [verdict.tree for verdict in judged(trees, ({},)) if verdict.promoted]


@dataclass(frozen=True)
class _Forester:
    rules: Sequence[Rule]
    compositions: Mapping[Hop, Tree]

    def trees(self, expression: Expression) -> list[Tree]:
        match expression:
            case Leaf():
                return [expression]
            case Product(factors):
                return self.of_chain(factors)
            case Sum(terms):
                rule = addition(len(terms))
                return [Step(rule, part) for part in self.combined(terms)]
            case Apply(function, arguments, kind):
                return [
                    Applied(application(function, len(part), kind), part, expression)
                    for part in self.combined(arguments)
                ]
        return []  # of a hop by itself, which is no matrix yet

    def combined(self, parts: Sequence[Expression]) -> Iterator[tuple[Tree, ...]]:
        """Choose one tree of each; of too many, the first of each list, or the last."""
        choices = [self.trees(part) for part in parts]
        if prod(map(len, choices)) <= MAX_COMBINATIONS:
            return product(*choices)
        return iter((tuple(c[0] for c in choices), tuple(c[-1] for c in choices)))

    def of_chain(self, factors: Sequence[Expression]) -> list[Tree]:
        """Give the trees of every interval of the chain, the shorter ones first."""
        found = {(i, i + 1): self.trees(factor) for i, factor in enumerate(factors)}
        for length in range(2, len(factors) + 1):
            for start in range(len(factors) - length + 1):
                trees = self.of_interval(start, start + length, found)
                if isinstance(hop := factors[start], Hop):
                    inner = found[start + 1, start + length]
                    trees += [_put(self.compositions[hop], X) for X in inner if X.kind == "dense"]
                found[start, start + length] = trees
        return found[0, len(factors)]

    def of_interval(
        self, start: int, stop: int, found: Mapping[tuple[int, int], list[Tree]]
    ) -> list[Tree]:
        """Cut the interval into the operands of a rule, in every way."""
        return [
            Step(rule, operands)
            for rule in self.rules
            for inner in combinations(range(start + 1, stop), len(rule.operands) - 1)
            for operands in product(*(found[cut] for cut in pairwise((start, *inner, stop))))
            if rule.accepts(operands)
        ]


def _put(composition: Tree, X: Tree) -> Tree:
    """Compose a hop for ``X``."""
    if isinstance(composition, Leaf):
        return X if composition is _X else composition
    return Step(composition.rule, tuple(_put(part, X) for part in composition.operands))
