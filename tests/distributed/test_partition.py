"""A graph cut into files is the same graph, whatever the parts; damaged files are refused."""

import json
import shutil
import tracemalloc
from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest

import sparsefmt
from sparsefmt import COO, Graph, errors
from sparsefmt.cli import main
from sparsefmt.distributed.parts import cutting, files
from sparsefmt.distributed.parts.cutting import write_partition
from sparsefmt.distributed.parts.files import read_part, read_partition
from sparsefmt.distributed.parts.rows import balanced, bounds_of_degrees, check_ends, metis
from sparsefmt.generate import power_law
from sparsefmt.io import chunks
from sparsefmt.io.checksums import checksum
from sparsefmt.reorder import Order

N = 50
METIS = pytest.param(
    "metis", marks=pytest.mark.skipif(not find_spec("pymetis"), reason="pymetis is not installed")
)


def edges_of(n=N, seed=0, count=300):
    return np.random.default_rng(seed).integers(0, n, (2, count))


def graph_of(ends, weight=None, n=N):
    return Graph(COO(ends[1], ends[0], weight, shape=(n, n)))


def vertex_data(n=N, seed=1):
    draw = np.random.default_rng(seed)
    masks = {"train": draw.random(n) < 0.5, "test": draw.random(n) < 0.5}
    x = draw.normal(size=(n, 3)).astype(np.float32)
    return {"features": x, "labels": draw.integers(-1, 4, n), "masks": masks}


def together(folder, ranks):
    """What all ranks read, with the first numbers of vertices: edges, weights, data."""
    found = read_partition(folder)
    parts = [read_part(found, rank, ranks) for rank in range(ranks)]
    order = found.order()
    order = np.arange(found.vertices) if order is None else order
    edges = order[np.concatenate([part.edge_index for part in parts], axis=1)]
    data = {name: [getattr(p, name) for p in parts] for name in ("features", "labels")}
    data |= {name: [p.masks[name] for p in parts] for name in parts[0].masks}
    given = {name: pieces for name, pieces in data.items() if pieces[0] is not None}
    whole = {name: np.concatenate(pieces)[np.argsort(order)] for name, pieces in given.items()}
    weights = [part.edge_weight for part in parts]
    return edges, None if weights[0] is None else np.concatenate(weights), whole


def triples(ends, weight=None):
    weight = np.ones(ends.shape[1]) if weight is None else weight
    return sorted(zip(*ends.tolist(), weight.tolist(), strict=True))


@pytest.mark.parametrize("by", ["balanced", METIS])
@pytest.mark.parametrize(("parts", "ranks"), [(1, 1), (3, 3), (3, 2), (7, 3), (7, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_parts_are_the_graph(tmp_path, by, parts, ranks, weighted):
    ends, data = edges_of(), vertex_data()
    weight = np.random.default_rng(2).normal(size=300) if weighted else None
    folder = tmp_path / "parts"
    said = write_partition(graph_of(ends, weight), folder, parts, partitioner=by, **data)
    assert read_partition(folder) == said
    edges, weights, whole = together(folder, ranks)
    if by == "balanced":  # edges of a part keep their order
        order = np.searchsorted(said.bounds, ends[1], side="right")
        assert (edges == ends[:, np.argsort(order, kind="stable")]).all()
    assert triples(edges, weights) == triples(ends, weight)
    assert (whole.pop("features") == data["features"]).all()
    assert (whole.pop("labels") == data["labels"]).all()
    assert whole.keys() == data["masks"].keys()
    assert all((whole[name] == mask).all() for name, mask in data["masks"].items())


@pytest.mark.parametrize(("n", "count"), [(N, 0), (0, 0), (1, 3), (2, 1)])
@pytest.mark.parametrize("by", ["balanced", METIS])
def test_small_and_empty_graphs_have_parts(tmp_path, n, count, by):
    ends = edges_of(n, count=count) if n else np.zeros((2, 0), int)
    said = write_partition(graph_of(ends, n=n), tmp_path / "parts", 4, partitioner=by)
    assert (said.vertices, said.edges, said.parts) == (n, count, 4)
    assert triples(together(tmp_path / "parts", 4)[0]) == triples(ends)
    pieces = write_partition([ends], tmp_path / "pieces", 4, partitioner=by, num_nodes=n)
    assert pieces.fingerprint == said.fingerprint
    folders = sorted(path.name for path in (tmp_path / "parts").iterdir() if path.is_dir())
    assert folders == [f"part{part}" for part in range(4)]


@pytest.mark.parametrize("ends", [([9], [0]), ([0], [9])])
def test_the_largest_end_of_an_edge_counts_the_vertices(tmp_path, ends):
    assert write_partition([tuple(map(np.array, ends))], tmp_path / "parts", 1).vertices == 10


def test_a_fingerprint_is_that_of_earlier_releases(tmp_path):
    ends = np.arange(6)
    data = {"features": np.eye(6, 2), "labels": ends % 2, "masks": {"train": ends < 3}}
    said = write_partition([(ends, ends[::-1], ends + 0.5)], tmp_path / "parts", 2, **data)
    assert said.graph == "0547bf202922e925b830553b88c0a3cd"


def test_a_fingerprint_knows_graph_and_data_but_not_parts_or_order(tmp_path):
    ends, data = edges_of(), vertex_data()
    shuffled = graph_of(ends[:, ::-1])

    def fingerprint(graph, parts, by="balanced", **changed):
        folder = tmp_path / "parts"
        shutil.rmtree(folder, ignore_errors=True)
        return write_partition(graph, folder, parts, partitioner=by, **(data | changed)).graph

    def backwards(graph, parts):
        return Order(np.arange(N)[::-1].copy()), balanced(graph, parts)

    first = fingerprint(graph_of(ends), 2)
    assert first == fingerprint(shuffled, 3) == fingerprint(graph_of(ends), 4, backwards)
    other = ends.copy()
    other[0, 5] = (other[0, 5] + 1) % N
    features = data["features"].copy()
    features[3, 1] += 1
    found = {
        first,
        fingerprint(graph_of(other), 2),
        fingerprint(graph_of(ends[::-1]), 2),
        fingerprint(graph_of(ends, np.ones(300)), 2),
        fingerprint(graph_of(ends), 2, features=features),
        fingerprint(graph_of(ends), 2, labels=data["labels"][::-1]),
        fingerprint(graph_of(ends), 2, masks={}),
    }
    assert len(found) == 7
    assert {*map(len, found)} == {32}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ending", ["npz", "csv", "tsv.gz", "mtx"])
def test_files_are_read_in_pieces(tmp_path, monkeypatch, ending, weighted):
    monkeypatch.setattr(chunks, "LENGTH", 64)
    monkeypatch.setattr(sparsefmt.io.edge_list, "_BLOCK", 256)
    ends = edges_of()
    weight = np.random.default_rng(2).normal(size=300) if weighted else None
    csr = graph_of(ends, weight).csr
    sparsefmt.write(tmp_path / f"graph.{ending}", csr)
    assert len(list(chunks.read_chunks(tmp_path / f"graph.{ending}"))) > 3
    said = write_partition(tmp_path / f"graph.{ending}", tmp_path / "parts", 3)
    edges, weights, _ = together(tmp_path / "parts", 3)
    assert triples(edges, weights) == triples(ends, weight)
    assert said.graph == write_partition(graph_of(ends, weight), tmp_path / "again", 2).graph


@pytest.mark.parametrize("ending", ["csv", "tsv.gz"])
def test_a_list_of_edges_takes_more_vertices_than_it_names(tmp_path, capsys, ending):
    path = tmp_path / f"graph.{ending}"
    sparsefmt.write(path, graph_of(edges_of()).csr)
    command = ["partition", str(path), "--parts", "3", "-o", str(tmp_path / "parts")]
    assert main([*command, "--num-nodes", "70"]) == 0
    assert read_partition(tmp_path / "parts").vertices == 70
    assert triples(together(tmp_path / "parts", 3)[0]) == triples(edges_of())
    assert main([*command[:-1], str(tmp_path / "few"), "--num-nodes", "7"]) == 2
    assert "vertices are integers from 0 to 6" in capsys.readouterr().err


def test_the_whole_graph_is_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "LENGTH", 1000)
    ends = edges_of(count=200_000)
    sparsefmt.write(tmp_path / "graph.npz", graph_of(ends).csr)
    del ends
    monkeypatch.setattr(cutting, "_BUFFER", 1 << 14)
    tracemalloc.start()
    write_partition(tmp_path / "graph.npz", tmp_path / "parts", 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 * 8 / 4  # a quarter of the ends of all edges as int32


@pytest.mark.parametrize("bound", ["array", "all"])
def test_files_are_written_in_blocks_within_one_bound(tmp_path, monkeypatch, bound):
    """24 files of 100 pieces are opened a few times each, and hold no more than they may."""
    ends = edges_of(count=20_000)
    weight = np.random.default_rng(2).normal(size=20_000)
    held, write = [], cutting._NewArray.write

    def counted(file):
        held.append(file.waiting)
        write(file)

    monkeypatch.setattr(cutting._NewArray, "write", counted)
    if bound == "array":
        monkeypatch.setattr(cutting, "_BUFFER", 1 << 14)
    else:
        monkeypatch.setattr(cutting, "default_limit", lambda: 1 << 18)
    pieces = [(*ends[:, i : i + 200], weight[i : i + 200]) for i in range(0, 20_000, 200)]
    write_partition(pieces, tmp_path / "parts", 8, num_nodes=N)
    assert 24 < len(held) < 24 * 8
    assert max(held) < (1 << 14) + 200 * 8
    edges, weights, _ = together(tmp_path / "parts", 8)
    assert triples(edges, weights) == triples(ends, weight)


def test_pieces_of_ones_own_and_files_of_data(tmp_path):
    ends, data = edges_of(), vertex_data()
    np.save(tmp_path / "x.npy", data["features"])
    pieces = [(ends[0, :100], ends[1, :100]), (ends[0, 100:], ends[1, 100:])]
    more = {"features": tmp_path / "x.npy", "labels": None}
    write_partition(pieces, tmp_path / "parts", 2, num_nodes=N, **more)
    edges, _, whole = together(tmp_path / "parts", 2)
    assert triples(edges) == triples(ends)
    assert (whole["features"] == data["features"]).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_metis_cuts_fewer_edges_than_balanced_rows(parts):
    pytest.importorskip("pymetis")
    A = power_law(2000, 16000, community=50, seed=1)
    graph = Graph(A)
    order, bounds = metis(graph, parts)
    assert sorted(order.perm.tolist()) == list(range(2000))
    B, share = order.apply(A).tocoo(), A.nnz / parts

    def cut(coo, bounds):
        part = np.searchsorted(bounds, np.arange(2000), side="right")
        return (part[coo.row] != part[coo.col]).sum()

    assert parts == 1 or cut(B, bounds) < 0.6 * cut(A.tocoo(), balanced(graph, parts))
    entries = np.diff(np.append(0, np.cumsum(np.bincount(B.row, minlength=2000)))[list(bounds)])
    assert (entries < 1.1 * share + 60).all()


def test_balanced_parts_begin_at_the_border_that_is_nearer_to_their_share():
    rng = np.random.default_rng(0)
    for parts in range(1, 9):
        degrees = rng.integers(0, 9, 40) ** 2
        ends = np.append(0, np.cumsum(degrees + 1))
        wanted = [np.abs(ends - ends[-1] * p / parts).argmin() for p in range(parts + 1)]
        assert bounds_of_degrees(degrees, parts) == tuple(wanted)
    assert balanced(graph_of(edges_of()), 1) == (0, N)


@pytest.mark.parametrize(
    ("shape", "source_bounds", "text"),
    [
        ((4, 4), None, ""),
        ((4, 9), (0, 1, 9), ""),
        ((5, 5), None, "bounds end at 4 but graph has 5 rows"),
        ((4, 9), None, "source_bounds is not given: give those of its 9 columns"),
        ((4, 9), (0, 1, 8), "but graph has 9 columns: give 9 last"),
        ((4, 4), (0, 1, 8), "but graph has 4 columns: give 4 last"),
        ((4, 9), (0, 9), "give the first row of each of the 2 ranks"),
    ],
)
def test_bounds_end_with_the_graph(shape, source_bounds, text):
    with pytest.raises(errors.ShapeError, match=text) if text else nullcontext():
        check_ends(shape, (0, 2, 4), source_bounds)


def test_vertices_without_edges_go_to_the_lightest_parts():
    pytest.importorskip("pymetis")
    ends = np.array([[0, 1, 2, 4], [1, 0, 4, 2]])
    order, bounds = metis(graph_of(ends, n=40), 4)
    assert sorted(order.perm.tolist()) == list(range(40))
    sizes = np.diff(bounds)
    assert sizes.sum() == 40
    assert np.ptp(sizes) <= 4


def test_metis_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pymetis", None)
    with pytest.raises(errors.UnsupportedError, match=r"pip install 'sparsefmt\[metis\]'"):
        metis(graph_of(edges_of()), 2)


# What is refused


def wrong_arguments():
    ends, data = edges_of(), vertex_data()
    nothing, empty, number = ({"partitioner": lambda *_, cut=cut: cut} for cut in (None, (), 7))
    good, wide = graph_of(ends), Graph(COO(ends[1], ends[0], shape=(N, 99)))
    short, objects = data["features"][1:], np.full((N, 1), None)
    return {
        "parts": (errors.ShapeError, "parts is 0", good, 0, {}),
        "no integer": (errors.ShapeError, "parts is 2.5", good, 2.5, {}),
        "rectangular": (errors.ShapeError, "square", wide, 2, {}),
        "partitioner": (errors.UnsupportedError, "'best'", good, 2, {"partitioner": "best"}),
        "generator": (errors.UnsupportedError, "several times", iter([ends]), 2, {}),
        "number": (errors.UnsupportedError, "graph is a int", 7, 2, {}),
        "array": (errors.UnsupportedError, r"is a ndarray: .*\(edge_index\)", ends, 2, {}),
        "mapping": (errors.UnsupportedError, "graph is a dict", {"edge_index": ends}, 2, {}),
        "ends": (errors.UnsupportedError, r"ndarray as a piece: .*\(source", tuple(ends), 2, {}),
        "below 0": (errors.IndexRangeError, "number vertices from 0", [ends - N], 2, {}),
        "nothing": (errors.UnsupportedError, "gave a NoneType: give the bo", good, 2, nothing),
        "no bounds": (errors.UnsupportedError, "gave a tuple", good, 2, empty),
        "a number": (errors.UnsupportedError, "gave a int", good, 2, number),
        "features": (errors.ShapeError, "features has shape", good, 2, {"features": short}),
        "labels": (errors.DtypeError, "give integers", good, 2, {"labels": np.ones(N)}),
        "low labels": (errors.IndexRangeError, "below -1", good, 2, {"labels": np.full(N, -2)}),
        "masks": (errors.UnsupportedError, "val and test", good, 2, {"masks": {"all": [1]}}),
        "mask": (errors.DtypeError, "give bool", good, 2, {"masks": {"val": np.ones(N)}}),
        "objects": (errors.DtypeError, "give numbers", good, 2, {"features": objects}),
        "negative": (errors.IndexRangeError, "source", [ends - 1], 2, {}),
        "beyond": (errors.IndexRangeError, "vertices", [ends], 2, {"num_nodes": 10}),
        "lengths": (errors.ShapeError, "one length", [(ends[0], ends[1, 1:])], 2, {}),
        "floats": (errors.DtypeError, "source", [ends + 0.5], 2, {}),
        "weights": (
            errors.DtypeError, "one dtype", [ends, (*ends, np.ones(300))], 2, {}
        ),
        "cut": (errors.ShapeError, "must cut all", good, 2, {"partitioner": lambda *_: (0, 1, 2)}),
        "many vertices": (errors.OutOfMemoryError, "vertices", [ends + 2**50], 2, {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong_arguments())
def test_wrong_arguments_are_refused_and_leave_nothing(tmp_path, name):
    kind, text, graph, parts, options = wrong_arguments()[name]
    with pytest.raises(kind, match=text):
        write_partition(graph, tmp_path / "parts", parts, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["zip", "text"])
def test_a_file_of_features_that_is_no_array_is_refused(tmp_path, how):
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        np.savez(file, x=np.ones((N, 2))) if how == "zip" else file.write(b"1 2 3")
    with pytest.raises(errors.FileFormatError, match=r"x\.npy: the array is .*numpy\.save"):
        write_partition(graph_of(edges_of()), tmp_path / "parts", 2, features=path)


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(errors.FileFormatError, match="there already"):
        write_partition(graph_of(edges_of()), tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write_partition(graph_of(edges_of()), tmp_path / "no" / "parts", 2)
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(errors.FileFormatError, match=r"no folder: give one of sparsefmt part"):
        read_partition(tmp_path / "mine")


LOOP = np.zeros((2, 1), int)
PASSES = [[LOOP, np.array(edge)] for edge in ([[1], [0]], [[0], [1]])]  # a vertex was not there


@pytest.mark.parametrize("passes", [[edges_of(), edges_of(seed=1)], *PASSES])
def test_a_graph_that_changes_between_passes_is_refused(tmp_path, passes):
    class Changing:
        times = 0

        def __iter__(self):
            self.times += 1  # the first time to see whether it can be, the second to count
            return iter([passes[self.times > 2]])

    with pytest.raises(errors.FileFormatError, match="changed while it was read"):
        write_partition(Changing(), tmp_path / "parts", 5)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def folder(tmp_path):
    write_partition(graph_of(edges_of()), tmp_path / "parts", 3, **vertex_data())
    return tmp_path / "parts"


def test_more_ranks_than_parts_are_refused(folder):
    with pytest.raises(errors.ShapeError, match=r"3 parts and there are 4 ranks: .*--parts 4"):
        read_part(folder, 0, 4)
    with pytest.raises(errors.ShapeError, match="from 0 to 1"):
        read_part(folder, 2, 2)


@pytest.mark.parametrize("name", ["source", "target", "features", "labels", "train"])
@pytest.mark.parametrize("how", ["flip", "cut", "more", "gone", "pickle"])
def test_a_damaged_file_is_refused(folder, name, how):
    path = folder / "part1" / f"{name}.npy"
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[-1] ^= 1
    if how == "pickle":
        np.save(path, np.array([print], object), allow_pickle=True)
        data = path.read_bytes()
    path.write_bytes({"cut": data[:-3], "more": data + b"0"}.get(how, data))
    if how == "gone":
        path.unlink()
    with pytest.raises(errors.FileFormatError, match=rf"{name}\.npy: .*copy the folder again"):
        read_part(folder, 1)
    read_part(folder, 0)  # the others are whole


HEADERS = {
    "no JSON": lambda said: b"{",
    "no object": lambda said: b"[1]",
    "binary": lambda said: b"\x80\x04\xff",
    "deep": lambda said: b"[" * 100_000,
    "no format": lambda said: {k: v for k, v in said.items() if k != "format"},
    "format 0": lambda said: said | {"format": 0},
    "no width": lambda said: {k: v for k, v in said.items() if k != "width"},
    "no bounds": lambda said: {k: v for k, v in said.items() if k != "bounds"},
    "bounds": lambda said: said | {"bounds": [0, 40, 20, N]},
    "one bound": lambda said: said | {"bounds": [0]},
    "texts": lambda said: said | {"bounds": ["a", "b"]},
    "negative": lambda said: said | {"edges": -1},
    "negative width": lambda said: said | {"width": -1},
    "no classes": lambda said: said | {"classes": None},
    "fingerprint": lambda said: said | {"graph": 7},
    "dtype": lambda said: said | {"dtypes": said["dtypes"] | {"features": "object"}},
    "name": lambda said: said | {"dtypes": said["dtypes"] | {"../x": "int64"}},
    "files": lambda said: said | {"files": {}},
    "sizes": lambda said: said | {"files": {key: [1] for key in said["files"]}},
    "more": lambda said: said | {"extra": 1},
    "empty bounds": lambda said: said | {"bounds": []},
    "many parts": lambda said: said | {"bounds": [*range(10**6)]},
    "edges": lambda said: said | {"edges": 299},
    "order": lambda said: said | {"ordered": True},
    "a list of dtypes": lambda said: said | {"dtypes": said["dtypes"] | {"labels": []}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_header_is_refused(folder, name):
    path = folder / "partition.json"
    said = HEADERS[name](json.loads(path.read_text()))
    texts = [said]
    if isinstance(said, dict):  # whose checksum is right, and not
        texts = [json.dumps(said | {"checksum": c}).encode() for c in (checksum(said), 1)]
    for text in texts:
        path.write_bytes(text)
        with pytest.raises(errors.FileFormatError, match=r"partition\.json: .*copy the folder"):
            read_partition(folder)


def test_a_header_may_have_so_many_bytes(folder, monkeypatch):
    size = (folder / "partition.json").stat().st_size
    monkeypatch.setattr(files, "_MOST", size)
    read_partition(folder)
    monkeypatch.setattr(files, "_MOST", size - 1)
    with pytest.raises(errors.FileFormatError, match=rf"it has more than {size - 1} bytes"):
        read_partition(folder)


def test_a_folder_of_an_earlier_release_needs_no_checksum(folder):
    path = folder / "partition.json"
    said = json.loads(path.read_text())
    del said["checksum"]
    path.write_text(json.dumps(said))
    with pytest.raises(errors.FileFormatError, match="its checksum is no number: it is dam"):
        read_partition(folder)
    path.write_text(json.dumps(said | {"format": 1}))
    assert triples(together(folder, 3)[0]) == triples(edges_of())


def test_a_later_format_and_another_folder_are_refused(folder, tmp_path):
    path = folder / "partition.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    with pytest.raises(errors.UnsupportedError, match="update sparsefmt"):
        read_partition(folder)
    with pytest.raises(errors.FileFormatError, match=r"no partition\.json"):
        read_partition(tmp_path)


BROKEN_NPZ = {
    "indptr": {"indptr": [0, 3, 2]},
    "short": {"indices": [0]},
    "long": {"indices": [0, 1, 1, 0]},
    "beyond": {"indices": [0, 1, 2]},
    "negative": {"indices": [0, 1, -1]},
    "more values": {"data": np.ones(5)},
    "fewer values": {"data": np.ones(2)},
}


@pytest.mark.parametrize("name", BROKEN_NPZ)
def test_a_csr_that_contradicts_itself_is_refused_in_pieces_too(tmp_path, name):
    good = {"indptr": [0, 2, 3], "indices": [0, 1, 1], "shape": [2, 2]}
    np.savez(tmp_path / "graph.npz", **(good | BROKEN_NPZ[name]))
    with pytest.raises(errors.FileFormatError, match=r"graph\.npz"):
        list(chunks.read_chunks(tmp_path / "graph.npz"))


# The command


def test_the_command_cuts_a_graph_with_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ends, data = edges_of(), vertex_data()
    sparsefmt.write("graph.npz", graph_of(ends).csr)
    (tmp_path / "data").mkdir()
    names = {"x": data["features"], "y": data["labels"], "train_mask": data["masks"]["train"]}
    for name, array in names.items():
        np.save(tmp_path / "data" / f"{name}.npy", array)
    assert main(["partition", "graph.npz", "--parts", "3", "-o", "parts", "--data", "data"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("wrote parts: 50 vertices and 300 edges in 3 parts by balanced, with ")
    edges, _, whole = together("parts", 2)
    assert triples(edges) == triples(ends)
    assert whole.keys() == {"features", "labels", "train"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["graph.npz", "--parts", "3", "-o", "graph.npz"], "there already"),
        (["graph.npz", "--parts", "0", "-o", "parts"], "x>=1"),
        (["graph.npz", "--parts", "2", "-o", "no/parts"], "no such folder"),
        (["graph.npz", "--parts", "2", "-o", "parts", "--data", "."], "none of x.npy"),
        (["none.npz", "--parts", "2", "-o", "parts"], "No such file"),
        (["graph.npz", "--parts", "2", "-o", "parts", "--num-nodes", "7"], "vertices"),
        (["graph.npz", "--parts", "2", "-o", "parts", "--num-nodes", "70"], "leave num_nodes out"),
        (["graph.npz", "--parts", "2", "-o", "parts", "--by", "luck"], "luck"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(tmp_path)
    sparsefmt.write("graph.npz", graph_of(edges_of()).csr)
    assert main(["partition", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sparsefmt: error:")
    assert text in line
    assert [one.name for one in tmp_path.iterdir()] == ["graph.npz"]
