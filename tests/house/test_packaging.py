"""What a user installs: sdist and wheel, and the wheel beside PyPI's ``ops`` and ``autograd``."""

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
#: What the checkout holds, but for what is for git and CI; and what its tools leave in it.
FILES = "CHANGELOG.md CONTRIBUTING.md LICENSE MANIFEST.in Makefile README.md constraints.txt"
FOLDERS = "benchmarks docs sparsefmt tests"
MADE = shutil.ignore_patterns("__pycache__", "*.nb[ci]", "_build", "quick")
# What pip says when it reached no registry, as opposed to a package that does not install.
NO_REGISTRY = re.compile(
    r"NewConnectionError|Connect(ion)?Timeout|ReadTimeout|ProxyError|MaxRetryError|Name or service"
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without the checkout's path: only what is installed can be imported."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Copy this tree, and build an sdist, and a wheel from that: they are in ``dist``."""
    source = tmp_path_factory.mktemp("source")
    for name in [*FILES.split(), "pyproject.toml"]:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS.split():
        shutil.copytree(ROOT / name, source / name, ignore=MADE)
    for name in ("ops", "autograd"):
        (source / name).symlink_to(Path("sparsefmt") / name)
    done = run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    return source


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    return source / "dist" / "sparsefmt-0.1.0-py3-none-any.whl"


def test_sdist_holds_what_its_own_tests_read(source):
    """All of this tree: its tests read the docs, which lead to results of benchmarks."""
    expected = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    with tarfile.open(source / "dist" / "sparsefmt-0.1.0.tar.gz") as archive:
        files = {Path(*Path(file.name).parts[1:]) for file in archive if file.isfile()}
    made = re.compile(r"(dist|build|ops|autograd|sparsefmt\.egg-info)/|PKG-INFO|setup\.cfg")
    differ = {path for path in files ^ expected if not made.match(path.as_posix())}
    assert not differ
    assert Path("tests/data/formats_v1.pickle") in files


def test_wheel_holds_the_package_and_nothing_else(source, wheel):
    """And its licence and entry points."""
    check = Path(sys.executable).with_name("check-wheel-contents")
    done = run(check, "--package=sparsefmt", "--toplevel=sparsefmt", wheel, cwd=source)
    assert done.returncode == 0, done.stdout
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.partition("/")[0] for name in archive.namelist()} - {"sparsefmt"}
    assert f"{info}/licenses/LICENSE" in archive.namelist()
    text = archive.read(f"{info}/entry_points.txt").decode()
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
site = homes[2].parent
assert [home.relative_to(site).as_posix() for home in homes] == [
    "autograd", "ops", "sparsefmt", "sparsefmt/autograd", "sparsefmt/ops"]
"""


@pytest.mark.slow
def test_installs_beside_the_packages_that_own_the_names_ops_and_autograd(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    scripts = tmp_path / "venv" / "bin"
    options = ("--no-compile", "--retries=2", "--constraint", ROOT / "constraints.txt")
    pip = (sys.executable, "-m", "pip", "--python", scripts / "python", "install")
    done = run(*pip, *options, wheel, "autograd", "ops", cwd=tmp_path)
    if done.returncode != 0 and NO_REGISTRY.search(done.stderr):
        pytest.skip(f"the package registry cannot be reached: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    done = run(scripts / "python", "-c", BESIDE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(scripts / "sparsefmt", "--help", cwd=tmp_path)
    assert done.returncode != 0  # click and rich are in the extra [cli]
    assert "sparsefmt[cli]" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
