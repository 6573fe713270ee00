"""Every real graph of the shared folder: its counts, and through every format and back."""

import re

import pytest

from sparsefmt import CSR
from sparsefmt.io import read, write

NAMES = """karate citeseer cora actor chameleon minesweeper pubmed p2p_gnutella31 proteins_full
luxembourg_osm musae_facebook email_enron gemsec_new_sites cit_hepph amazon_computers tolokers dd
fb_oklahoma97 com_dblp ego_twitter""".split()
SMALL = ["karate", "citeseer", "cora", "p2p_gnutella31", "proteins_full"]


@pytest.fixture(scope="module")
def manifest(shared_data):
    """Nodes, stored entries, empty rows and self-loops of each graph, from the table."""
    table = re.findall(
        r"^\| (\w+) \| (\d+) \| (\d+) \|[^|]*\|[^|]*\|[^|]*\| (\d+) \| (\d+) \|",
        (shared_data / "MANIFEST.md").read_text(),
        re.MULTILINE,
    )
    return {name: tuple(map(int, facts)) for name, *facts in table}


@pytest.fixture(scope="module")
def graph(shared_data):
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded.clear()
            loaded[name] = read(shared_data / f"{name}.npz")
        return loaded[name]

    return load


def test_every_graph_of_the_folder_is_here(shared_data, manifest):
    assert sorted(path.stem for path in shared_data.glob("*.npz")) == sorted(NAMES)
    assert sorted(manifest) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_the_manifest(graph, manifest, name):
    A = graph(name)
    nodes, stored, empty_rows, self_loops = manifest[name]
    assert isinstance(A, CSR)
    assert A.shape == (nodes, nodes)
    assert A.nnz == stored
    assert int((A.lengths == 0).sum()) == empty_rows
    coo = A.tocoo()
    assert int((coo.row == coo.col).sum()) == self_loops
    assert (A.data is not None) == (name == "p2p_gnutella31")


@pytest.mark.parametrize("name", NAMES)
def test_every_format_and_back_is_exact(graph, name):
    A = graph(name)
    assert A.tocoo().tocsr() == A
    assert A.tocsc().tocsr() == A
    assert A.tosgt().tocsr() == A
    assert A.tosgt((8, 8)).tocoo().tocsc().tocsr() == A


@pytest.mark.parametrize("ending", ["mtx", "mtx.gz", "csv", "npz"])
@pytest.mark.parametrize("name", SMALL)
def test_files_of_every_kind_give_the_graph_back(tmp_path, graph, name, ending):
    A = graph(name)
    path = tmp_path / f"a.{ending}"
    write(path, A)
    assert read(path, dtype=A.dtype) == A
