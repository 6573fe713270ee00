"""How many functions of the package a warm call enters: nobody adds a lap without saying so here.

A GPU is stood in for where there is none.  ``counted.py`` says how to print what a call enters,
in order: ``python tests/golden/counted.py stand-in``.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from counted import summary

pytestmark = pytest.mark.slow

#: Group of ``counted.py`` and call -> the most calls today, and the goal, which a later step makes
#: the limit; None where there is none.
LIMITS: dict[tuple[str, str], tuple[int, int | None]] = {
    ("arrays", "csr @ X"): (25, 25),
    ("cpu", "GCNConv of edges"): (86, 75),
    ("cpu", "GCNConv of edges, backward"): (38, None),
    ("cpu", "GATConv, edge_attr"): (225, 120),
    ("cpu", "GATConv, edge_attr, backward"): (194, None),
    ("ranks", "SAGEConv, DistGraph"): (87, 110),
    ("ranks", "SAGEConv, DistGraph, backward"): (79, 90),
    ("gpu", "csr @ X"): (9, 24),
    ("gpu", "spmm"): (15, 24),
    ("gpu", "spmm, backward"): (15, 20),
    ("gpu", "spmm, edge_weight"): (15, 30),
    ("gpu", "spmm, edge_weight, backward"): (31, 30),
    ("gpu", "GCNConv"): (29, 36),
    ("gpu", "GCNConv, backward"): (14, 22),
    ("gpu", "GCNConv, edge_weight"): (45, 60),
    ("gpu", "GCNConv, edge_weight, backward"): (14, None),
    ("gpu", "GATConv"): (41, 38),
    ("gpu", "GATConv, backward"): (23, 22),
    ("gpu", "GATv2Conv"): (43, 45),
    ("gpu", "GATv2Conv, backward"): (27, 40),
    ("gpu", "SAGEConv"): (32, 32),
    ("gpu", "SAGEConv, backward"): (17, 20),
    ("gpu", "maxk_aggregate"): (29, 35),
    ("gpu", "maxk_aggregate, backward"): (43, None),
    ("gpu", "sampled_aggregate"): (27, 32),
    ("gpu", "sampled_aggregate, backward"): (27, 40),
}
GPU = {name: limit for (group, name), limit in LIMITS.items() if group == "gpu"}
CPU = {place: limit for place, limit in LIMITS.items() if place[0] != "gpu"}

WITHOUT_GPU = ("arrays", "cpu", "ranks", "stand-in")


@cache
def entered(*groups: str) -> dict[str, dict[str, list[str]]]:
    """Return what each call of groups enters, counted in processes of their own."""
    command = [sys.executable, Path(__file__).with_name("counted.py"), *groups]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def entered_by(group: str) -> dict[str, list[str]]:
    """Return what each call of a group enters; those without a GPU are counted together."""
    return entered(*(("cuda",) if group == "cuda" else WITHOUT_GPU))[group]


def check(group: str, name: str, limit: int) -> None:
    """Compare the calls of one row with its limit."""
    found = entered_by(group)[name]
    shown = "\n  ".join([summary(name, found), *found])
    assert len(found) <= limit, f"{shown}\nmore than the {limit} calls that it takes today"


@pytest.mark.parametrize(("place", "limit"), CPU.items(), ids=[name for _, name in CPU])
def test_calls_on_the_cpu(place, limit):
    check(*place, limit[0])


@pytest.mark.parametrize("group", ["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "limit"), GPU.items(), ids=list(GPU))
def test_calls_on_a_gpu(group, name, limit):
    check(group, name, limit[0])


def test_every_call_has_a_limit():
    for group in WITHOUT_GPU:
        rows = GPU if group == "stand-in" else {name for place, name in CPU if place == group}
        assert set(entered_by(group)) == set(rows)
