"""Make the mutants of a module: one small change each, in code that a CPU runs.

Left as they are: docstrings, types, strings, decorators, imports, what a ``raise`` says,
``__repr__`` and branches for CuPy's arrays.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.BitXor: ast.BitAnd,
}  # fmt: skip
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
#: Fields that hold other statements: not part of a statement's own text.
INSIDE = ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list")
TYPES = ("annotation", "returns", "decorator_list", "bases", "type_params")


@dataclass
class Place:
    """A place in a tree, where one node can replace another."""

    parent: ast.AST
    field: str
    index: int | None
    statement: ast.stmt
    function: str

    @property
    def node(self) -> ast.AST:
        """The node in this place."""
        found = getattr(self.parent, self.field)
        return found if self.index is None else found[self.index]

    def put(self, node: ast.AST | None) -> None:
        """Put another node in this place."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


@dataclass(frozen=True)
class Mutant:
    """One change of one node of a module."""

    file: str  #: below the package, ``formats/arrays.py``
    place: int  #: number of the node
    change: int  #: number among the changes of that node
    function: str
    lines: tuple[int, ...]  #: of the statement, up to its colon
    before: str
    after: str

    @property
    def key(self) -> str:
        """Name the mutant as ``survivors.txt`` does: by what it says, not by where it stands."""
        return f"{self.file}:{self.function} | {self.after}"


def mutants(file: str, source: str) -> list[Mutant]:
    """List every mutant of a module."""
    found = []
    for number, place in enumerate(places(ast.parse(source))):
        node, before = place.node, text(place.statement)
        for change, other in enumerate(changes(place)):
            if isinstance(other, ast.Pass):
                after = "drop: " + before
            else:
                place.put(other)
                after = text(other if node is place.statement else place.statement)
                place.put(node)
            lines = tuple(range(place.statement.lineno, last_line(place.statement) + 1))
            found.append(Mutant(file, number, change, place.function, lines, before, after))
    times: Counter[str] = Counter()
    for place, mutant in enumerate(found):
        times[mutant.key] += 1
        if times[mutant.key] > 1:
            found[place] = replace(mutant, after=f"{mutant.after} ({times[mutant.key]})")
    return [mutant for mutant in found if mutant.before != mutant.after]


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """Give the tree of the module with that change in it."""
    tree = ast.parse(source)
    place = list(places(tree))[mutant.place]
    place.put(ast.copy_location(list(changes(place))[mutant.change], place.node))
    return ast.fix_missing_locations(tree)


def places(tree: ast.Module) -> Iterator[Place]:
    """Walk over the nodes that may change, in a fixed order."""
    yield from inside(tree, tree.body[0], "module")


def inside(node: ast.AST, statement: ast.stmt, function: str) -> Iterator[Place]:
    """Walk over the nodes below one."""
    for field, value in ast.iter_fields(node):
        if field in TYPES or (isinstance(node, ast.Raise) and field in ("exc", "cause")):
            continue
        many = isinstance(value, list)
        gpu = False
        for index, child in enumerate(value if many else [value]):
            if not isinstance(child, ast.AST) or is_left(child):
                continue
            gpu = gpu or imports_cupy(child)
            if gpu or for_cupy(node, field):
                continue
            mine = child if isinstance(child, ast.stmt) else statement
            place = Place(node, field, index if many else None, mine, function)
            yield place
            named = isinstance(child, FUNCTION | ast.ClassDef)
            outer = "" if function == "module" else f"{function}."
            yield from inside(child, mine, f"{outer}{child.name}" if named else function)
            gpu = gpu or ends_for_cpu(child)


def is_left(node: ast.AST) -> bool:
    """Tell whether a node has no mutants: strings, imports, ``__repr__``, what only types see."""
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return not imports_cupy(node)
        case ast.FunctionDef(name=name):
            return name in ("__repr__", "elementwise") or name.endswith(("_gpu", "_kernel"))
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return isinstance(node, ast.AnnAssign) and node.value is None


def imports_cupy(node: ast.AST) -> bool:
    """Tell whether a statement imports CuPy: those behind it are for a GPU."""
    return isinstance(node, ast.Import) and node.names[0].name == "cupy"


def asks_cupy(test: ast.AST) -> bool:
    """Tell whether a condition is ``is_cupy(...)``."""
    return isinstance(test, ast.Call) and ast.unparse(test.func).endswith("is_cupy")


def for_cupy(node: ast.AST, field: str) -> bool:
    """Tell whether a field of an ``if`` runs for CuPy's arrays alone."""
    if not isinstance(node, ast.If | ast.IfExp) or field == "test":
        return False
    negated = isinstance(node.test, ast.UnaryOp) and asks_cupy(node.test.operand)
    return (field == "body" and asks_cupy(node.test)) or (field == "orelse" and negated)


def ends_for_cpu(node: ast.AST) -> bool:
    """Tell whether NumPy's arrays leave the function here: ``if not is_cupy(a): return``."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.UnaryOp)
        and asks_cupy(node.test.operand)
        and isinstance(node.body[-1], ast.Return | ast.Raise)
    )


def changes(place: Place) -> Iterator[ast.AST]:
    """Give the nodes that may replace the one in a place."""
    node = place.node
    match node:
        case ast.Compare(left, ops, comparators):
            for index, op in enumerate(ops):
                others = [*ops[:index], COMPARISONS[type(op)](), *ops[index + 1 :]]
                yield ast.Compare(left, others, comparators)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC and not is_text(left, right):
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.AugAssign(target, op, value):
            yield ast.Pass()
            if type(op) in ARITHMETIC:
                yield ast.AugAssign(target, ARITHMETIC[type(op)](), value)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Slice(lower, upper, step):
            if lower:
                yield ast.Slice(None, upper, step)
            if upper:
                yield ast.Slice(lower, None, step)
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.Break():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield ast.Pass()
    is_condition = place.field in ("test", "ifs")
    if is_condition and not isinstance(node, ast.UnaryOp | ast.Compare | ast.Constant):
        yield ast.UnaryOp(ast.Not(), node)
    is_none = isinstance(node, ast.Constant) and node.value is None
    if isinstance(place.parent, ast.Return) and not is_none:
        yield ast.Constant(None)


def is_text(*operands: ast.AST) -> bool:
    """Tell whether an operand is a string, which has no arithmetic."""
    return any(
        isinstance(one, ast.JoinedStr)
        or (isinstance(one, ast.Constant) and isinstance(one.value, str | bytes))
        for one in operands
    )


def head(statement: ast.stmt) -> ast.stmt:
    """Give a statement without those inside it."""
    bare = copy.copy(statement)
    for field in INSIDE:
        if isinstance(getattr(bare, field, None), list):
            setattr(bare, field, [])
    return bare


def text(statement: ast.stmt) -> str:
    """Write a statement, up to its colon, on one line."""
    return " ".join(ast.unparse(head(statement)).split())


def last_line(statement: ast.stmt) -> int:
    """Find the last line of a statement, up to its colon."""
    nodes = [node for node in ast.walk(head(statement)) if hasattr(node, "end_lineno")]
    own = [node.end_lineno for node in nodes if node.lineno and type(node) is not type(statement)]
    simple = not hasattr(statement, "body")
    return statement.end_lineno if simple else max([statement.lineno, *own])
