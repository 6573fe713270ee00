"""Digest every result of the public API, bit by bit, to compare two versions of the library.

``python -m benchmarks digests --device cuda --twice -o before.json`` writes them, ``--compare
before.json`` beside it says what differs.  Results that add up by atomics are left out on a GPU.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import sparsefmt

from .. import _harness
from .._table import some_of
from .digest_cases import TABLES, calls
from .digest_inputs import GRAPHS, PLAIN, RICH, Leaves, Setting, matrix


def settings(device: str, graphs: list[str]) -> Iterator[Setting]:
    """Yield the graphs, dtypes and widths; a width of 0 is for what has no features."""
    for graph in graphs:
        for (dtype, index), widths in (RICH if graph == "powerlaw" else PLAIN).items():
            for feat in (0, *((128,) if graph == "large" else widths)):
                yield Setting(device, graph, dtype, index, feat)


def key(name: str, s: Setting) -> str:
    """Return the key of a call: ``ops/spmm/powerlaw/float32/int32/feat=64/sum``."""
    part, op, variant = name.split("/")
    feat = [f"feat={s.feat}"] if s.feat else []
    return "/".join([part, op, s.graph_name, s.dtype, s.index, *feat, variant])


def digest(value: Any) -> str:
    """Return the digest of a result: dtypes, shapes and bytes of all arrays in it."""
    found = hashlib.sha256()
    for piece in pieces(value):
        found.update(piece)
    return found.hexdigest()


def pieces(value: Any) -> Iterator[Any]:
    """Yield the bytes of a result and of what it is made of."""
    if isinstance(value, sparsefmt.Graph):
        value = value.csr
    if dataclasses.is_dataclass(value):
        yield type(value).__name__.encode()
        for field in dataclasses.fields(value):
            yield field.name.encode()
            yield from pieces(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        yield str(len(value)).encode()
        for one in value:
            yield from pieces(one)
    elif hasattr(value, "detach"):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        raw = value.detach().resolve_conj().cpu().contiguous().flatten()
        if raw.numel():  # torch views no expanded tensor without values
            yield raw.view(sys.modules["torch"].uint8).numpy().tobytes()
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield f"{value.dtype} {value.shape}".encode()
        yield (value.get() if hasattr(value, "get") else np.asarray(value)).tobytes()
    else:
        yield f"{type(value).__name__} {value!r}".encode()


def computed(call: Callable[[Any], Any], s: Setting, part: str, variant: str) -> dict[str, Any]:
    """Run one call and name its results; those of a function with gradients have them too."""
    if part == "ops":
        found = call(s)
        return dict(enumerate(found)) if isinstance(found, tuple) else {"": found}
    import torch

    leaves = Leaves(s)
    torch.manual_seed(11)
    torch.set_float32_matmul_precision("high" if "tf32" in variant else "highest")
    narrow = torch.autocast(s.device, torch.bfloat16, enabled="autocast" in variant)
    with narrow:
        made = call(leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    results = {f"y{place or ''}": one for place, one in enumerate(outputs)}
    wanted = [one for one in outputs if getattr(one, "requires_grad", False)]
    if wanted:
        torch.autograd.backward(wanted, [slope(one) for one in wanted])
    return results | {f"d.{name}": leaf.grad for name, leaf in leaves.leaves.items()}


def slope(y: Any) -> Any:
    """Return the gradient of a result: numbers without a pattern, the same everywhere."""
    import torch

    numbers = np.random.default_rng([7, *y.shape]).uniform(-1, 1, tuple(y.shape))
    return torch.tensor(numbers, dtype=y.dtype, device=y.device)


def digests(device: str, graphs: list[str], only: list[str]) -> dict[str, str]:
    """Compute everything that begins with one of the prefixes; an exception is a digest too."""
    found: dict[str, str] = {}
    matrix.cache_clear()
    for s in settings(device, graphs):
        if device == "cpu" and s.graph_name == "large":
            continue
        for name, call in calls(s).items():
            path, (part, _, variant) = key(name, s), name.split("/")
            if only and not path.startswith(tuple(only)):
                continue
            results = computed(call, s, part, variant)
            hashes = {str(place): digest(one) for place, one in results.items()}
            found |= {f"{path}/{place}".rstrip("/"): one for place, one in hashes.items()}
    return found


def twice(options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Compute digests in this process, and again if asked: those that repeat, and other keys."""
    found = digests(options.device, options.graphs, options.only)
    again = digests(options.device, options.graphs, options.only) if options.twice else found
    shaky = sorted(k for k in found | again if found.get(k) != again.get(k))
    return {k: v for k, v in found.items() if k not in shaky}, shaky


def shared_out(options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Compute digests in several processes, each its own operations: kernels compile at a time."""
    names = {f"{part}/{name.split('/')[0]}/" for part in TABLES for t in TABLES[part] for name in t}
    names = {one for one in names if one.startswith(tuple(options.only) or "")}
    # The order is that of a hash: what compiles longest is spread over the processes.
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    place = ["-m", f"{__package__}.digests"] if __package__ else [__file__]
    given = ["--device", options.device, "--graphs", ",".join(options.graphs)]
    given += ["--twice"] * options.twice
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number in range(min(options.jobs, len(order))):
            out = Path(folder) / f"{number}.json"
            only = [f"--only={name}" for name in order[number :: options.jobs]]
            command = [sys.executable, *place, *given, *only, "-o", str(out)]
            running.append((subprocess.Popen(command, stdout=subprocess.DEVNULL), out))
        found: dict[str, str] = {}
        shaky: list[str] = []
        for process, out in running:
            if process.wait():
                print(f"a process ended with {process.returncode}: {process.args}", file=sys.stderr)
                continue
            part = json.loads(out.read_text())
            found |= part["digests"]
            shaky += part["meta"]["unrepeatable"]
    return found, sorted(shaky)


def asked(path: str, meta: dict[str, Any]) -> bool:
    """Return True if a key is among what was computed."""
    only = tuple(meta["only"]) or ("",)
    return path.split("/")[2] in meta["graphs"] and path.startswith(only)


def compare(found: dict[str, Any], before: dict[str, Any]) -> int:
    """Print what differs from digests made before; 1 if anything does, or is missing."""
    shaky = {*found["meta"]["unrepeatable"], *before["meta"]["unrepeatable"]}
    both = (found["digests"], before["digests"])
    new, old = ({k: v for k, v in one.items() if k not in shaky} for one in both)
    old = {k: v for k, v in old.items() if asked(k, found["meta"])}
    differ = [k for k in old if k in new and old[k] != new[k]]
    missing = [k for k in old if k not in new]
    for title, keys in (("differs", differ), ("missing", missing)):
        for one in keys:
            print(f"{title}: {one}")
    agree = len(old) - len(differ) - len(missing)
    print(f"{agree} of {len(old)} agree, {len(differ)} differ, {len(missing)} are missing,")
    print(f"{len(new.keys() - old.keys())} are new, {len(shaky)} are not repeatable")
    return 1 if differ or missing else 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks digests", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("-o", "--out", type=Path, help="file of the JSON")
    parser.add_argument("--compare", type=Path, help="file of digests made before")
    parser.add_argument("--twice", action="store_true", help="leave out what does not repeat")
    parser.add_argument("--only", action="append", default=[], help="prefix of keys: ops/spmm")
    some = ",".join(GRAPHS)
    parser.add_argument("--graphs", type=some_of(GRAPHS), help=f"some of {some}")
    parser.add_argument("--jobs", type=int, default=1, help="processes to share the work")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Compute, write and compare digests."""
    options = parse(argv)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    options.graphs = [*(options.graphs or GRAPHS)]
    start = time.monotonic()
    found, shaky = (shared_out if options.jobs > 1 else twice)(options)
    kept = {k: found[k] for k in sorted(found)}
    meta = _harness.machine(cuda=options.device == "cuda") | {"unrepeatable": shaky}
    meta |= {"graphs": options.graphs, "only": options.only}
    made = {"meta": meta | {"seconds": round(time.monotonic() - start, 1)}, "digests": kept}
    print(f"{len(kept)} digests, {len(shaky)} not repeatable,", end=" ")
    print(f"in {made['meta']['seconds']} s")
    if options.out:
        options.out.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    return compare(made, json.loads(options.compare.read_text())) if options.compare else 0


BENCHMARKS = {"digests": main}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
