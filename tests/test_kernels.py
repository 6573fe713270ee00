"""Every kernel compiles for every architecture, on a machine without a GPU."""

import pytest

from sparsefmt.ops import _jit

nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy brings NVRTC")

ARCHITECTURES = (75, 80, 90, 120)
FILES = sorted({file for file, _ in _jit.declared()})
#: Instantiations compiled together: few enough for all cores to have a part.
TOGETHER = 40
PARTS = [
    (file, names[k : k + TOGETHER])
    for file, names in sorted(_jit._declared.items())
    for k in range(0, len(names), TOGETHER)
]


def compile_part(file: str, names: list[str], arch: int) -> list[str]:
    """The mangled names of these instantiations."""
    from cuda.pathfinder import find_nvidia_header_directory

    program = nvrtc.createProgram(_jit.source(file), file, [], [])
    for name in names:
        nvrtc.addNameExpression(program, name)
    headers = find_nvidia_header_directory("cudart")
    try:
        nvrtc.compileProgram(program, [f"-arch=sm_{arch}", f"-I{headers}", *_jit.OPTIONS])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert len(nvrtc.getCUBIN(program)) > 0
    return [nvrtc.getLoweredName(program, name) for name in names]


def test_every_kernel_file_declares_instantiations():
    folder = _jit.Path(_jit.__file__).parent
    assert sorted(path.name for path in folder.glob("*.cu")) == FILES


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("file", "names"), PARTS, ids=lambda part: str(part)[:40])
def test_every_instantiation_compiles(file, names, arch):
    assert len(set(compile_part(file, names, arch))) == len(names)


def test_no_instantiation_is_declared_twice():
    assert len(set(_jit.declared())) == len(_jit.declared())


def test_source_has_its_own_headers_pasted_in():
    assert '#include "common.cuh"' not in _jit.source("spmm.cu")
    assert "constexpr int WARP" in _jit.source("spmm.cu")


@pytest.mark.parametrize(
    ("dtypes", "constants", "expected"),
    [
        (("float32", "int32"), (8, 4), "k<float, int, 8, 4>"),
        (("bfloat16", "int64"), (), "k<__nv_bfloat16, long long>"),
    ],
)
def test_an_expression_is_the_name_of_its_instantiation(dtypes, constants, expected):
    assert _jit.expression("k", dtypes, constants) == expected
