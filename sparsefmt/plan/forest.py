"""Trees of an expression, by an interval dynamic programme over its chains.

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
#: The features that a hop is composed for.
_X = Leaf("X", "dense", "n", "feat", grad=True)


def forest(expression: Expression, rules: Sequence[Rule] = FUSED) -> tuple[Tree, ...]:
    """Build the distinct trees that compute the expression, or its factored form.

    Each hop has every composition that no other beats, the same wherever it occurs.
    """
    simple = simplified(expression)
    trees: dict[Tree, None] = {}
    for chosen in product(*(_compositions(hop, rules) for hop in hops(simple))):
        forester = _Forester(rules, dict(zip(hops(simple), chosen, strict=True)))
        for form in dict.fromkeys((simple, factored(simple))):
            trees |= dict.fromkeys(forester.trees(form))
    return tuple(trees)


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
        return []  # a hop alone is no matrix yet

    def combined(self, parts: Sequence[Expression]) -> Iterator[tuple[Tree, ...]]:
        """Yield combinations of the parts' trees; of too many, all first ones and all last ones."""
        choices = [self.trees(part) for part in parts]
        if prod(map(len, choices)) <= MAX_COMBINATIONS:
            return product(*choices)
        return iter((tuple(c[0] for c in choices), tuple(c[-1] for c in choices)))

    def of_chain(self, factors: Sequence[Expression]) -> list[Tree]:
        """Build the trees of every interval of the chain, the shorter ones first."""
        trees_of = {(i, i + 1): self.trees(factor) for i, factor in enumerate(factors)}
        for length in range(2, len(factors) + 1):
            for start in range(len(factors) - length + 1):
                trees = self.of_interval(start, start + length, trees_of)
                if isinstance(hop := factors[start], Hop):
                    inner = trees_of[start + 1, start + length]
                    trees += [_put(self.compositions[hop], X) for X in inner if X.kind == "dense"]
                trees_of[start, start + length] = trees
        return trees_of[0, len(factors)]

    def of_interval(
        self, start: int, stop: int, trees_of: Mapping[tuple[int, int], list[Tree]]
    ) -> list[Tree]:
        """Build the steps of an interval: each rule on each cut into operands."""
        return [
            Step(rule, operands)
            for rule in self.rules
            for inner in combinations(range(start + 1, stop), len(rule.operands) - 1)
            for operands in product(*(trees_of[cut] for cut in pairwise((start, *inner, stop))))
            if rule.accepts(operands)
        ]


def _put(composition: Tree, X: Tree) -> Tree:
    """Replace the features in a hop's composition by ``X``."""
    if isinstance(composition, Leaf):
        return X if composition is _X else composition
    return Step(composition.rule, tuple(_put(part, X) for part in composition.operands))
