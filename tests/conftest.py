"""What every test may ask for: an array module per device, the shared graphs, one profile."""

import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# The same examples on every run and machine; SPARSEFMT_EXAMPLES=2000 for a longer search.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    max_examples=int(os.environ.get("SPARSEFMT_EXAMPLES", "50")),
)
settings.load_profile("ci")

os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """One thread in each worker, set before the workers start: they share the cores already."""
    for pool in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ.setdefault(f"{pool}_NUM_THREADS", "1")


@pytest.fixture(scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """The array module under test; a test that takes it runs once for each device."""
    if request.param == "numpy":
        return np
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    return cupy


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs: ``$SPARSEFMT_DATA``, else ``../shared/data`` of the checkout."""
    folder = Path(os.environ.get("SPARSEFMT_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real graphs at {folder}: set SPARSEFMT_DATA")
    return folder
