"""The demo: what it measures, that it notices wrong results; and that the README's code runs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from sparsefmt import COO, CSR, DeviceError, cli, generate
from sparsefmt.cli import commands, demo, doctor, tables
from sparsefmt.cli.doctor import Device, Driver
from sparsefmt.formats import convert

ROOT = Path(__file__).resolve().parents[2]


def small_graph(weighted: bool = True) -> COO:
    A = generate.power_law(300, 2000, community=50, seed=3)
    values = np.random.default_rng(3).standard_normal(A.nnz).astype(np.float32)
    return A.with_data(values if weighted else None)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One run of each measurement is enough here."""
    monkeypatch.setattr(demo, "BUDGET", 0.0)
    monkeypatch.setattr(demo, "LEAST", 1)


GRAPHS = {
    "weighted": small_graph(),
    "unweighted": small_graph(weighted=False),
    "no cells": COO([], [], shape=(0, 0)),
    "no entries": COO([], [], np.zeros(0, np.float32), shape=(4, 3)),
    "duplicates and zeros": COO(
        [2, 0, 2, 2], [1, 1, 1, 0], np.array([0.0, 1.0, -0.0, 3.0]), shape=(3, 2)
    ),
    "float16": small_graph().astype(np.float16),
    "int64 indices": small_graph().astype(index_dtype=np.int64),
    "huge and not finite": COO(
        [0, 1, 2], [0, 1, 2], np.array([1e300, np.nan, np.inf]), shape=(3, 3)
    ),
    "below the normal numbers": COO([0, 0], [0, 1], np.array([1e-38, 1e-40]), shape=(2, 2)),
    "csr": small_graph().tocsr(),
    "sgt": small_graph().tosgt((8, 4)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_survives_every_format(name):
    heard = []
    outcome = demo.run(GRAPHS[name], "cpu", step=heard.append)
    assert len(heard) == demo.n_steps()
    assert {"SGT -> CSC", "SGT @ X"} < {*heard}
    assert outcome.good
    assert len(outcome.exact) == len(outcome.seconds) == 12
    assert set(outcome.products) == set(outcome.nbytes) == {"coo", "csr", "csc", "sgt"}
    assert all(product.kernel.startswith("spmm_") for product in outcome.products.values())


def test_a_wrong_conversion_is_noticed(monkeypatch):
    honest = convert._EDGES["csr", "csc"]

    def wrong(A, want_perm):
        B, perm = honest(A, want_perm)
        return (B if B.data is None else B.with_data(B.data[::-1])), perm

    monkeypatch.setitem(convert._EDGES, ("csr", "csc"), wrong)
    outcome = demo.run(GRAPHS["weighted"], "cpu")
    assert not outcome.exact["csr", "csc"]
    assert not outcome.exact_from("csr")
    assert not outcome.round_trip
    assert not outcome.good
    assert "NO" in table_text(outcome)
    assert any("WRONG RESULTS" in line for line in tables.demo_notes(outcome))


def test_a_wrong_product_is_noticed(monkeypatch):
    monkeypatch.setattr(COO, "__matmul__", lambda self, X: CSR.__matmul__(self.tocsr(), X) * 1.001)
    outcome = demo.run(GRAPHS["weighted"], "cpu")
    assert not outcome.products["coo"].verified
    assert outcome.products["csr"].verified
    assert "WRONG" in table_text(outcome)


def table_text(outcome) -> str:
    console = tables.console()
    with console.capture() as captured:
        tables.show(console, [tables.demo(outcome)])
    return captured.get()


def test_triples_tell_apart_what_differs_in_one_bit():
    A = GRAPHS["duplicates and zeros"]
    same = demo.triples(A.tocsc())
    assert demo.same(demo.triples(A), same)
    for other in (
        A.with_data(np.abs(A.data)),  # -0.0 became 0.0
        A.with_data(None),
        A.astype(np.float32),
        COO(A.row, A.col[::-1].copy(), A.data, shape=A.shape),
    ):
        assert not demo.same(demo.triples(other), same)


def test_reference_is_the_dense_product():
    A, X = GRAPHS["weighted"], np.random.default_rng(0).standard_normal((300, 5)).astype(np.float32)
    found = demo.float64_product(A, X)
    dense = A.toarray(np.float64)
    assert np.allclose(found.exact, dense @ X, rtol=1e-12)
    assert np.allclose(found.magnitude, np.abs(dense) @ np.abs(X), rtol=1e-12)
    assert found.degree.ravel().tolist() == np.bincount(A.row, minlength=300).tolist()
    assert demo.compare(found.exact, found) == (0.0, True)
    assert demo.compare(found.exact[:-1], found) == (float("inf"), False)
    assert demo.compare(found.exact * np.nan, found)[1] is False


def test_measure_counts_neither_the_first_run_nor_more_than_it_may(monkeypatch):
    monkeypatch.setattr(demo, "BUDGET", 60.0)
    monkeypatch.setattr(demo, "MOST", 4)
    calls = []
    seconds, first = demo.measure(lambda: calls.append(None) or len(calls), "cpu")
    assert (first, len(calls)) == (1, 5)
    assert seconds >= 0


def test_embedded_graph_is_the_same_each_time():
    A, B = demo.embedded_graph(), demo.embedded_graph()
    assert A == B
    assert (A.shape, A.nnz, A.dtype) == ((20_000, 20_000), 400_000, np.float32)
    assert A.tocsr().lengths.max() > 10 * A.nnz / A.n_rows


# Where it runs


def test_auto_takes_the_cpu_where_no_gpu_is(monkeypatch):
    monkeypatch.setattr(doctor, "find_driver", lambda: Driver(None, (), "none"))
    device, description = demo.pick_device("auto")
    assert device == "cpu"
    assert description.startswith("NumPy and numba on the CPU")
    assert demo.pick_device("cpu") == (device, description)


def test_auto_says_why_a_gpu_is_not_used(monkeypatch):
    gpu = Driver((13, 0), (Device(0, "GPU", (9, 0), 1),))
    monkeypatch.setattr(doctor, "find_driver", lambda: gpu)
    refuse = Mock(side_effect=DeviceError("CuPy is not installed"))
    monkeypatch.setattr(demo, "parse_device", refuse)
    device, description = demo.pick_device("auto")
    assert device == "cpu"
    assert description.endswith("a GPU is here, but CuPy is not installed")
    with pytest.raises(DeviceError, match="CuPy is not installed"):
        demo.pick_device("cuda")


def test_a_gpu_is_named_and_waited_for(monkeypatch):
    runtime = SimpleNamespace(getDeviceProperties=lambda ordinal: {"name": b"GPU %d" % ordinal})
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=Mock())
    monkeypatch.setattr(demo, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(demo, "parse_device", lambda device: 1)
    assert demo.pick_device("cuda") == ("cuda:1", "CuPy on GPU 1")
    demo.measure(lambda: None, "cuda:1")
    assert cuda.get_current_stream().synchronize.call_count == 2


# The command


def test_demo_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.mtx").write_text("%%MatrixMarket matrix coordinate real general\n2 3 2\n1 3 1\n2 1 4\n")
    assert cli.main(["demo", "a.mtx", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[:2] == ["a.mtx", "2 x 3, 2 stored entries"]
    assert [line.split()[0] for line in lines[5:9]] == ["COO", "CSR", "CSC", "SGT"]
    assert max(map(len, lines)) <= 80
    assert "every conversion gave the original" in out
    assert lines[-1].startswith("wrote sparsefmt-demo.png; ")
    assert Path("sparsefmt-demo.png").stat().st_size > 20_000


def test_exit_code_of_a_wrong_demo_is_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "embedded_graph", lambda: GRAPHS["weighted"])
    monkeypatch.setattr(demo, "same", lambda a, b: False)
    assert cli.main(["demo"]) == 1
    assert "WRONG RESULTS" in capsys.readouterr().out


def test_long_times_stay_in_80_columns(monkeypatch):
    product = demo.Product("spmm_through_csr", 1234.5678, 1e-7, True)
    names = demo.FORMATS
    pairs = {(a, b): 1234.5678 for a in names for b in names if a != b}
    nbytes, products = dict.fromkeys(names, 10**10), dict.fromkeys(names, product)
    outcome = demo.Outcome(pairs, dict.fromkeys(pairs, True), True, nbytes, products)
    monkeypatch.setenv("COLUMNS", "80")
    text = table_text(outcome)
    assert max(map(len, text.splitlines())) <= 80
    assert "1,234,568" in text


@pytest.mark.slow
def test_demo_from_nothing_takes_seconds(tmp_path):
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sparsefmt", "demo", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "20,000 x 20,000, 400,000 stored entries" in done.stdout
    assert (tmp_path / "sparsefmt-demo.png").is_file()
    assert time.perf_counter() - start < 60


@pytest.mark.gpu
def test_demo_on_the_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--device", "cuda"]) == 0
    assert "CuPy on " in capsys.readouterr().out
    assert Path("sparsefmt-demo.png").is_file()


# The README


def test_readme_names_what_exists():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert f"\n{target}:" in makefile
    used = set(re.findall(r"^sparsefmt (\w+)", readme, re.MULTILINE))
    assert used == set(commands.sparsefmt.commands) - {"doctor", "demo", "calibrate"}  # slow
    extras = set(re.findall(r"\[(\w+)\]'", readme))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert extras == {"cli", "cuda13", "torch", "test"}
    assert all(f"\n{extra} = [" in pyproject for extra in extras)
    assert (ROOT / "LICENSE").is_file()
