"""What a user installs: the wheel's content, and it beside PyPI's ``ops`` and ``autograd``."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
#: What the checkout holds, but for what is for git and CI; and what its tools leave in it.
FILES = [
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md"),
    *("constraints.txt", "pyproject.toml"),
]
FOLDERS = ["benchmarks", "docs", "sparsefmt", "tests"]
MADE = ["__pycache__", "*.nb[ci]", "_build", "quick"]

# What pip says when it reached no registry, as opposed to a package that does not install.
NO_REGISTRY = re.compile(
    r"NewConnectionError|Connect(ion)?Timeout|ReadTimeout|ProxyError|MaxRetryError|Name or service"
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Outside the checkout, and without its path: only what is installed can be imported.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of this tree, so that what is built leaves the checkout clean."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns(*MADE))
    for name in ("ops", "autograd"):
        (source / name).symlink_to(Path("sparsefmt") / name)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """A wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    done = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", folder, source),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_sdist_holds_what_its_own_tests_read(source, tmp_path):
    """All of this tree: its tests read the docs, which lead to results of benchmarks."""
    expected = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    expected -= {path for path in expected if path.parts[0] in ("build", "ops", "autograd")}
    build = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    done = run(sys.executable, "-c", build, cwd=source)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        files = [Path(*Path(file.name).parts[1:]) for file in archive if file.isfile()]
    made = {Path("PKG-INFO"), Path("setup.cfg")}
    made |= {path for path in {*files, *expected} if path.parts[0].endswith(".egg-info")}
    assert {*files} - made == expected - made
    assert Path("tests/data/formats_v1.pickle") in files


def test_wheel_holds_every_file_of_the_package(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.py", "*.cu", "*.cuh", "py.typed")
        for path in (ROOT / "sparsefmt").rglob(pattern)
    }
    assert "sparsefmt/py.typed" in expected
    assert not expected - packed


def test_wheel_holds_the_package_and_nothing_else(wheel):
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"sparsefmt"}


def test_wheel_is_pure_and_names_its_licence_and_entry_points(wheel):
    archive = zipfile.ZipFile(wheel)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = archive.namelist()
    assert any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in names)
    (entry_points,) = [name for name in names if name.endswith("/entry_points.txt")]
    text = archive.read(entry_points).decode()
    assert "sparsefmt = sparsefmt.cli:main" in text
    assert "_ = sparsefmt.testing.plugin:register" in text


BESIDE = """
import autograd, autograd.numpy, ops
import numpy as np
import sparsefmt, sparsefmt.autograd, sparsefmt.ops
from pathlib import Path

assert autograd.grad(lambda x: x**3)(2.0) == 12.0
assert issubclass(ops.ActiveStatus, ops.StatusBase)
A = sparsefmt.CSR(np.array([0, 2, 3]), np.array([0, 1, 1]), np.array([1.0, 2.0, 3.0]), shape=(2, 2))
assert A.toarray().tolist() == [[1.0, 2.0], [0.0, 3.0]]
assert A.tocsc().toarray().tolist() == A.toarray().tolist()
homes = [Path(one.__file__).parent
         for one in (autograd, ops, sparsefmt, sparsefmt.autograd, sparsefmt.ops)]
assert len(set(homes)) == 5, homes
site = homes[2].parent
assert [home.relative_to(site).as_posix() for home in homes] == [
    "autograd", "ops", "sparsefmt", "sparsefmt/autograd", "sparsefmt/ops"]
"""


@pytest.mark.slow
def test_installs_beside_the_packages_that_own_the_names_ops_and_autograd(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    done = run(
        *(
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--no-compile",
            "--retries=2",
        ),
        *("--constraint", CONSTRAINTS, wheel, "autograd", "ops"),
        cwd=tmp_path,
    )
    if done.returncode != 0 and NO_REGISTRY.search(done.stderr):
        pytest.skip(f"the package registry cannot be reached: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    done = run(python, "-c", BESIDE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    help_text = run(tmp_path / "venv" / "bin" / "sparsefmt", "--help", cwd=tmp_path)
    assert help_text.returncode != 0  # click and rich are in the extra [cli]
    assert "sparsefmt[cli]" in help_text.stderr + help_text.stdout
    assert "Traceback" not in help_text.stderr
