"""Every kernel compiles for every architecture, on a machine without a GPU."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from sparsefmt.errors import DeviceError
from sparsefmt.formats import condense
from sparsefmt.ops.engine import jit
from sparsefmt.ops.tiles import cuda as tiles_cuda
from sparsefmt.ops.tiles import cuda_edges as tiles_cuda_edges
from sparsefmt.ops.tiles import slab_kernels
from sparsefmt.ops.tiles.split import HEIGHTS

nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy brings NVRTC")

#: The first compiles all, as it is compiled for users, each other one its part: all of a few would
#: take most of the tests' time.
ARCHITECTURES = (90, 75, 80, 100, 120)
#: Of the others' parts, all that checks and translates and hardly any of what optimises: half the
#: time, or a fifth.
QUICKLY = "--Ofast-compile=max"
FILES = sorted({file for file, _ in jit.declared()})
#: Instantiations compiled together: few enough for all cores to have a part.
TOGETHER = 40
NAMES = {file: [name for other, name in jit.declared() if other == file] for file in FILES}
CHOSEN = [
    (arch, file, names if part == 0 else names[part - 1 :: len(ARCHITECTURES) - 1])
    for part, arch in enumerate(ARCHITECTURES)
    for file, names in NAMES.items()
]
PARTS = [
    (arch, file, names[k : k + TOGETHER])
    for arch, file, names in CHOSEN
    for k in range(0, len(names), TOGETHER)
]
#: For each architecture and file, one instantiation of each kernel.
OPTIMISED = [
    (arch, file, list({name.split("<")[0]: name for name in names}.values()))
    for arch, file, names in CHOSEN
    if names
]


def compile_part(file: str, names: list[str], arch: int, *options: str) -> list[str]:
    """The mangled names of these instantiations."""
    return compile_source(file, jit.source(file), names, f"sm_{arch}", *options)


def compile_source(file: str, source: str, names: list[str], arch: str, *options: str) -> list[str]:
    from cuda.pathfinder import find_nvidia_header_directory

    program = nvrtc.createProgram(source, file, [], [])
    for name in names:
        nvrtc.addNameExpression(program, name)
    headers = find_nvidia_header_directory("cudart")
    options = (f"-arch={arch}", f"-I{headers}", *jit.OPTIONS, *options)
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    binary = nvrtc.getCUBIN if arch.startswith("sm_") else nvrtc.getPTX
    assert len(binary(program)) > 0
    return [nvrtc.getLoweredName(program, name) for name in names]


def test_every_kernel_file_declares_instantiations():
    folder = jit.Path(jit.__file__).parent.parent
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.cu")) == FILES


def covering(names: list[str]) -> list[str]:
    """Some of one kernel's instantiations: each value of each template argument is in one."""
    seen: set[tuple[int, str]] = set()
    found = []
    for name in names:
        arguments = set(enumerate(name[name.index("<") + 1 : -1].split(", ")))
        if arguments - seen:
            found.append(name)
            seen |= arguments
    return found


def covering_of_files() -> list[tuple[str, list[str]]]:
    """For each file, instantiations of its kernels that meet every template argument."""
    found = []
    for file, names in NAMES.items():
        kernels = {name.split("<")[0] for name in names}
        of_kernel = ([n for n in names if n.split("<")[0] == one] for one in sorted(kernels))
        found.append((file, [name for group in of_kernel for name in covering(group)]))
    return found


@pytest.mark.parametrize(
    ("file", "names"), covering_of_files(), ids=lambda part: part if isinstance(part, str) else ""
)
def test_every_template_argument_compiles(file, names):
    """To PTX, in a quarter of the time; ``test_every_kernel_compiles_as_for_users`` goes on."""
    arch = f"compute_{ARCHITECTURES[0]}"
    assert len(set(compile_source(file, jit.source(file), names, arch, QUICKLY))) == len(names)


@pytest.mark.grid
@pytest.mark.parametrize(("arch", "file", "names"), PARTS, ids=lambda part: str(part)[:40])
def test_every_instantiation_compiles(arch, file, names):
    """For one architecture, and a part of them, of every file, for each other one."""
    options = [] if arch == ARCHITECTURES[0] else [QUICKLY]
    assert len(set(compile_part(file, names, arch, *options))) == len(names)


@pytest.mark.covering("arch", "file", one_in=5)
@pytest.mark.parametrize(("arch", "file", "names"), OPTIMISED, ids=lambda part: str(part)[:40])
def test_every_kernel_compiles_as_for_users(arch, file, names):
    """One instantiation of it, with all that optimises, for one architecture."""
    assert len(set(compile_part(file, names, arch))) == len(names)


ELEMENTWISE = [
    kernel
    for module in (condense, slab_kernels)
    for kernel in vars(module).values()
    if hasattr(kernel, "cache_clear")
]
C_TYPES = {"int64": "long long", "uint64": "unsigned long long", "bool": "bool"} | {
    f"{sign}int{bits}": f"{sign and 'unsigned '}{name}"
    for bits, name in ((8, "char"), (16, "short"), (32, "int"))
    for sign in ("", "u")
}


def elementwise_source(kernel, types: dict[str, str]) -> str:
    """What CuPy makes of it, but that places are no arrays."""
    arguments = []
    for p in (*kernel.in_params, *kernel.out_params):
        kind = p.ctype if p.dtype is None else C_TYPES[np.dtype(p.dtype).name]
        const = "const " * p.is_const
        arguments.append(f"{const}{f'CArray<{kind}, 1, true>' if p.raw else kind} {p.name}")
    letters = [f"typedef {C_TYPES[kind]} {letter};" for letter, kind in types.items()]
    return (
        f"{' '.join(letters)}\n{kernel.preamble}\n#include <cupy/carray.cuh>\n"
        f'extern "C" __global__ void kernel({", ".join(arguments)}, long long size) {{\n'
        f"CUPY_FOR(i, size) {{\n{kernel.operation};\n}} }}"
    )


@pytest.mark.covering("kernel", "types", "arch", one_in=5)  # nothing in them depends on it
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("types", [("int32", "uint8"), ("int64", "uint16")], ids=str)
@pytest.mark.parametrize("kernel", ELEMENTWISE, ids=lambda kernel: kernel.__name__)
def test_kernels_of_tiles_compile(kernel, types, arch):
    cupy = pytest.importorskip("cupy", reason="CuPy brings the array class")
    from cuda.pathfinder import find_nvidia_header_directory

    include = Path(cupy.__file__).parent / "_core" / "include"
    folders = [include, *include.glob("cupy/_cccl/*"), find_nvidia_header_directory("cudart")]
    index, slot = types
    source = elementwise_source(kernel(), {"I": index, "C": index, "S": slot})
    program = nvrtc.createProgram(source, "kernel.cu", [], [])
    options = [f"-arch=sm_{arch}", "--std=c++17", "-DCUPY_NO_CUDA_INCLUDES"]
    try:
        nvrtc.compileProgram(program, [*options, *(f"-I{folder}" for folder in folders)])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))


#: What a block of ``spmm_sgt_mma`` has, by the kernel's own types.
BLOCK_OF_TILES = """
template <typename T, typename Index, int HEIGHT, int FEAT, int WEIGHTS> struct Block {
    using C = Cut<HEIGHT, FEAT>;
    using D = Depth<T, WEIGHTS != UNWEIGHTED>;
    using X = Rows<T, Index, FEAT, C::THREADS, D::SLABS, D::STAGES>;
    using Rings = typename Guide<T, Index, C::TILES, WEIGHTS != UNWEIGHTED>::Rings;
    using Valued = Values<T, Index, HEIGHT, D::SLABS, D::STAGES, C::THREADS, WEIGHTS>;
    static constexpr int SHARED = sizeof(typename X::Stage) * D::STAGES + sizeof(Rings)
        + (WEIGHTS == UNWEIGHTED ? 0 : Valued::SIZE * sizeof(T));
};
"""


def test_the_launcher_knows_what_a_block_of_tiles_takes():
    named = [name for file, name in jit.declared() if name.startswith("spmm_sgt_mma")]
    checks = []
    for types in product(tiles_cuda.DTYPES, ("int32", "int64")):
        for height, widths in tiles_cuda.SLICES.items():
            for width, weights in product(widths, tiles_cuda.WEIGHTS[types[0]]):
                block = jit.expression("Block", types, (height, width, weights))
                shared = tiles_cuda.shared_bytes(*types, height, width, weights)
                threads = 32 * tiles_cuda.team(height, width)[0]
                checks.append(f"static_assert({block}::SHARED == {shared});")
                checks.append(f"static_assert({block}::C::THREADS == {threads});")
                assert shared <= 99 * 1024  # of every device that has such tensor cores
    assert len(checks) == 2 * len(named)
    source = "\n".join([jit.source("tiles/spmm.cu"), BLOCK_OF_TILES, *checks])
    compile_source("tiles/spmm.cu", source, [], "sm_80")


def test_the_launcher_knows_what_a_block_of_products_at_the_entries_takes():
    checks = []
    for height, row in product(HEIGHTS, tiles_cuda_edges.ROWS):
        threads, shared = tiles_cuda_edges.block(height, row)
        checks.append(f"static_assert(Block<{height}, {row}>::SHARED == {shared});")
        checks.append(f"static_assert(Block<{height}, {row}>::THREADS == {threads});")
        assert shared <= 99 * 1024
        assert threads * 128 <= 2**16  # registers
    source = "\n".join([jit.source("tiles/sddmm.cu"), *checks])
    compile_source("tiles/sddmm.cu", source, [], "sm_80")


def test_launches_of_products_at_the_entries_take_every_feature_once():
    for dtype, size in (("float16", 2), ("float32", 4)):
        for feat in range(16 // size, 3000, 16 // size):
            row, ranges = tiles_cuda_edges.launches(dtype, feat)
            begins, flags = zip(*ranges, strict=True)
            assert row in tiles_cuda_edges.ROWS
            assert begins == tuple(range(0, feat, row // size))
            add, keep = tiles_cuda_edges.ADD, tiles_cuda_edges.KEEP
            assert [bool(one & add) for one in flags] == [begin > 0 for begin in begins]
            assert [bool(one & keep) for one in flags] == [begin < begins[-1] for begin in begins]
            assert len(begins) == 1 or row == max(tiles_cuda_edges.ROWS)


def test_slices_of_tiles_are_compiled_for_every_height():
    assert set(tiles_cuda.SLICES) == set(HEIGHTS)
    for height in HEIGHTS:
        for feat in (1, 31, 32, 33, 64, 65, 127, 128, 257, 4096):
            assert tiles_cuda.slice_of(height, feat) in tiles_cuda.SLICES[height]


def test_no_instantiation_is_declared_twice():
    assert len(set(jit.declared())) == len(jit.declared())


def test_source_has_its_own_headers_pasted_in():
    assert '#include "engine/common.cuh"' not in jit.source("matmul/spmm.cu")
    assert "constexpr int WARP" in jit.source("matmul/spmm.cu")


@pytest.mark.parametrize(
    ("dtypes", "constants", "expected"),
    [
        (("float32", "int32"), (8, 4), "k<float, int, 8, 4>"),
        (("bfloat16", "int64"), (), "k<__nv_bfloat16, long long>"),
    ],
)
def test_an_expression_is_the_name_of_its_instantiation(dtypes, constants, expected):
    assert jit.expression("k", dtypes, constants) == expected


@pytest.mark.gpu
def test_what_is_declared_compiles_for_this_device(monkeypatch):
    few = jit.declared()[::200]
    monkeypatch.setattr(jit, "declared", lambda: few)
    assert jit.compile_all() == len(few)


def test_compiling_without_a_device_says_so(monkeypatch):
    cupy = pytest.importorskip("cupy")

    def no_device():
        raise cupy.cuda.runtime.CUDARuntimeError(100)

    monkeypatch.setattr(jit, "current_device", no_device)
    with pytest.raises(DeviceError, match="there is no CUDA device: cudaErrorNoDevice"):
        jit.compile_all()
