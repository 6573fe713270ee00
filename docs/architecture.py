"""Draw docs/architecture.svg: ``python docs/architecture.py``.

Rooms are the folders of ``sparsefmt/ops`` and their functions the public names that the package
lists; the tables below say where the functions of torch and the layers stand.  A test draws again.
"""

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRAWING = ROOT / "docs" / "architecture.svg"

#: Room -> what it computes, its paper, and the public names above it in autograd and in nn.
ROOMS = {
    "matmul": (
        "A @ X",
        "fuseGNN",
        ["spmm", "propagate", "aggregate_with_own"],
        ["GCNConv, SAGEConv", "GINConv, SGConv", "TAGConv"],
    ),
    "edges": ("a number an entry", "", ["sddmm", "edge_softmax"], []),
    "attention": (
        "softmax and sums",
        "fuseGNN",
        ["gat_aggregate", "gatv2_aggregate", "dot_aggregate"],
        ["GATConv, GATv2Conv", "TransformerConv", "AGNNConv"],
    ),
    "cbsr": ("k features a row", "MaxK-GNN", ["maxk", "maxk_aggregate"], ["MaxK"]),
    "sampling": ("a sample of each row", "ES-SpMM", ["sampled_aggregate"], []),
    "tiles": ("on tensor cores", "TC-GNN", [], []),
    "messages": (
        "features of edges",
        "",
        ["message_aggregate", "edge_combine", "relational_aggregate"],
        ["GINEConv", "RGCNConv", "FastRGCNConv"],
    ),
    "gcn": ("normalised values", "fuseGNN", ["gcn_norm"], []),
}
#: What rooms offer under names of others.
OPTIONS = {
    "nn": {
        "cbsr": ["k= of GCNConv,", "SAGEConv, GINConv"],
        "sampling": ["sample= of GCNConv,", "SAGEConv, GINConv"],
    },
    "autograd": {"tiles": ["prepare(tile=...)"]},
    "ops": {"cbsr": ["sddmm"], "tiles": ["spmm and sddmm", "of an SGT"]},
}
#: Public names of torch that no box of a room shows, beside the layers of ``nn/conv``.
UNDRAWN = {"as_graph", "capture", "gat_of_vectors", "prepare", "replace_layers"}
#: Public names that belong to no room.
SHARED = {"Costs", "Transpose", "compile_all", "explain", "transpose"}

ROOF = [
    ("graph.py, halo.py", "the rows of a rank, and", "what it reads of others"),
    ("products.py, loss.py", "functions of autograd", "over ranks"),
    ("parts/", "a graph in parts and its", "files, without torch"),
    ("job/", "training; a rank", "that is gone is named"),
]
MODEL = [
    ("optimizing.py", "optimize: layers run", "their cheapest order"),
    ("decisions.py", "vertices, tiles and", "captures that pay"),
    ("capturing.py", "capture: a step as", "one CUDA graph"),
    ("state.py", "what a model holds,", "put back after trials"),
]
TORCH = [
    ("tensors/", "the arrays of a Graph as", "tensors, made once; prepare"),
    ("engine/library.py", "a torch op for each", "row of the table"),
    ("engine/memory.py", "pointers, streams and", "results of torch"),
    ("own_parts.py", "sums, own parts and", "a bias in one node"),
]
PLAN = [
    ("expression.py", "a layer as products", "of typed matrices"),
    ("rules.py, forest.py", "every way to compute", "them: SENSEi"),
    ("pruning.py", "ways that another", "beats at any width"),
    ("pricing.py", "seconds, by the rows of", "ops and the device"),
    ("planner.py", "the choice, and", "its reasons"),
]
ENGINE = [
    ("table.py", "one row for", "each operation"),
    ("bind.py", "checks arguments", "by the row"),
    ("call.py", "the one way", "to a kernel"),
    ("explain.py", "which kernel,", "and why"),
    ("memory.py", "arrays of any", "library"),
    ("structure.py", "a CSR as", "kernels see it"),
    ("jit.py", "compiles and", "launches .cu"),
    ("cpu.py, lanes.py", "loops by numba,", "SIMD"),
]
FORMATS = [
    ("COO CSR CSC SGT CBSR", "frozen arrays and a shape,", "NumPy or CuPy"),
    ("convert.py, condense.py", "every format to every other,", "with the permutation"),
    ("../graph/", "Graph: every format of one", "structure, each built once"),
    ("chunks.py", "equal shares of", "the entries"),
]
BESIDE = [
    ("io/", "files"),
    ("interop/", "PyG, SciPy, DGL, ..."),
    ("reorder.py, stats.py", "orders, statistics"),
    ("testing/", "strategies, oracles"),
    ("cli/", "the command line"),
]
FILES = ["a room for each", "family, with files", "api.py", "cuda.py, *.cu", "cpu.py", "oracle.py"]

COLOURS = {"fuseGNN": "#2b6cb0", "MaxK-GNN": "#b7472a", "ES-SpMM": "#2f855a", "TC-GNN": "#805ad5"}
DARK, GREY, PALE = "#1a202c", "#4a5568", "#718096"
LEFT, COLUMN, GAP = 126, 160, 8
RIGHT = LEFT + len(ROOMS) * (COLUMN + GAP) - GAP
WIDTH = RIGHT + 12
MONO = "font-family='ui-monospace, Menlo, Consolas, monospace'"
SANS = "font-family='system-ui, Helvetica, Arial, sans-serif'"


def functions_of_rooms() -> dict[str, list[str]]:
    """Public functions of each room, without those that give gradients of others."""
    sys.path.insert(0, str(ROOT))
    from sparsefmt import autograd, nn, ops

    folders = {path.parent.name for path in (ROOT / "sparsefmt/ops").glob("*/__init__.py")}
    if folders - {"engine"} != set(ROOMS):
        raise ValueError(f"ROOMS differ from the folders of sparsefmt/ops: {sorted(folders)}")
    for package, place in ((autograd, 2), (nn, 3)):
        drawn = {
            name for room in ROOMS.values() for line in room[place] for name in line.split(", ")
        }
        if unknown := drawn - set(package.__all__):
            raise ValueError(f"{package.__name__} has no {', '.join(sorted(unknown))}")
        folder = [names for path, names in package._MODULES.items() if path.startswith("conv.")]
        left = set(package.__all__) - drawn - UNDRAWN - set(" ".join(folder).split())
        if left:
            raise ValueError(f"no room shows {', '.join(sorted(left))}")
    found: dict[str, list[str]] = {room: [] for room in ROOMS}
    for module, names in ops._MODULES.items():
        for name in names.split():
            if name not in SHARED and not name.endswith("_backward"):
                found[module.split(".")[0]].append(name)
    return {room: sorted(names) for room, names in found.items()}


def text(
    x: float, y: float, words: str, colour: str = GREY, size: int = 11, font: str = SANS
) -> str:
    """Words; names of code are darker, larger and in ``MONO``."""
    style = f"{font} font-size='{size}' fill='{colour}'"
    return f"<text x='{x:g}' y='{y:g}' {style}>{escape(words)}</text>"


def name(x: float, y: float, words: str, colour: str = DARK, size: int = 12) -> str:
    """The bold name of a file, a folder or a room."""
    return text(x, y, words, colour, size, f"{MONO} font-weight='bold'")


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    """A rectangle with round corners."""
    place = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='5'"
    return f"<rect {place} fill='{fill}' stroke='{stroke}'/>"


def storey(y: float, title: str, *says: str) -> list[str]:
    """The name of a storey at the left, and what it is."""
    return [
        name(12, y + 20, title, size=14),
        *(text(12, y + 38 + 14 * i, line) for i, line in enumerate(says)),
    ]


def rooms(y: float, height: float, storey: str, names: dict[str, list[str]]) -> list[str]:
    """A box for each room that has something in this storey."""
    drawn = []
    for i, (room, (computes, paper, *_)) in enumerate(ROOMS.items()):
        x, top, colour = LEFT + i * (COLUMN + GAP), y + 20, COLOURS.get(paper, GREY)
        lines = [*names[room], *OPTIONS[storey].get(room, [])]
        if not lines:
            continue
        drawn.append(box(x, y, COLUMN, height, "#ffffff", colour))
        if storey == "ops":
            drawn += [name(x + 10, top, f"{room}/", colour, 14), text(x + 10, top + 16, computes)]
            drawn.append(text(x + 10, y + height - 9, paper, colour))
            top += 38
        drawn += [text(x + 10, top + 16 * k, one, DARK, 12, MONO) for k, one in enumerate(lines)]
    return drawn


def bar(y: float, parts: list[tuple[str, ...]], fill: str) -> list[str]:
    """What all rooms share: names, and below each what it does."""
    height, step = 20 + 14 * len(parts[0]), (RIGHT - LEFT) / len(parts)
    drawn = [box(LEFT, y, RIGHT - LEFT, height, fill, PALE)]
    for i, (title, *does) in enumerate(parts):
        x = LEFT + 10 + i * step
        drawn.append(name(x, y + 20, title))
        drawn += [text(x, y + 37 + 14 * k, line) for k, line in enumerate(does)]
    return drawn


def draw() -> str:
    """The drawing, from the roof to the ground."""
    ops = functions_of_rooms()
    ground = 76 + 16 * max(len(names) for names in ops.values())
    above = {place: {room: row[place] for room, row in ROOMS.items()} for place in (2, 3)}
    line = f"x1='12' x2='{RIGHT}' y1='409' y2='409' stroke='{PALE}' stroke-dasharray='2 4'"
    drawn = [
        *storey(12, "distributed/", "one graph on", "several GPUs"),
        *bar(12, ROOF, "#ebf4ff"),
        *storey(86, "nn/", "layers, with PyG's", "parameters; conv/", "has 16 more"),
        *rooms(86, 68, "nn", above[3]),
        *storey(166, "model/", "what is done to a", "user's model"),
        *bar(166, MODEL, "#ebf4ff"),
        *storey(240, "autograd/", "functions of torch", "with gradients"),
        *rooms(240, 68, "autograd", above[2]),
        *bar(316, TORCH, "#ebf4ff"),
        text(LEFT, 404, "only storeys above this line import torch", PALE, 10),
        f"<line {line}/>",
        *storey(422, "plan/", "composition, by", "prices of ops"),
        *bar(422, PLAN, "#fffaf0"),
        *storey(498, "ops/", *FILES),
        *rooms(498, ground, "ops", ops),
    ]
    y = 498 + ground + 8
    drawn += storey(y, "ops/engine/", "what rooms share") + bar(y, ENGINE, "#edf2f7")
    y += 74
    drawn += storey(y, "formats/", "matrices; no torch,", "no kernels of ops")
    drawn += bar(y, FORMATS, "#edf2f7")
    drawn += storey(y + 74, "beside") + bar(y + 74, BESIDE, "#ffffff")
    rule = "A storey imports only from those below it. What stands beside uses formats;"
    drawn.append(text(12, y + 138, f"{rule} testing uses ops, cli plan too.", PALE))
    size = f"width='{WIDTH}' height='{y + 150:g}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y + 150:g}' {size}>"
    title = "<title>The storeys and rooms of sparsefmt</title>"
    return "\n".join([head, title, f"<rect {size} fill='#f7fafc'/>", *drawn, "</svg>", ""])


if __name__ == "__main__":
    DRAWING.write_text(draw(), encoding="utf-8")
