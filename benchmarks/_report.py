"""Run every benchmark, write docs/results.md from what was kept, and compare two results.

``python -m benchmarks all [--device cpu|cuda] [--quick] [--out FOLDER]`` skips what has a result of
this commit and machine; ``python -m benchmarks report`` writes docs/results.md; ``python -m
benchmarks compare A.json B.json`` lists what got slower beyond noise, and returns 1 if any did.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsefmt.formats.arrays import parse_device

from . import _harness
from ._table import MACHINE, RESULTS, ROOT, add_options
from .papers import write_claims

#: Commits after which a figure is marked as old.
OLD = 100
#: Least change of a median that counts, for results without spreads.
NOISE = 0.05
#: What ``all`` runs, with options that keep it under 20 minutes on an H100: a first step in a
#: process of its own, with empty caches, takes five of them.
COMMANDS: dict[str, tuple[str, ...]] = {
    "convert": (),
    "overhead": (),
    "messages": (),
    "rgcn": ("--widths", "64"),
    "softmax": (),
    "sddmm": (),
    "spmm": (),
    "maxk": ("--k", "8,16,32,64"),
    "fuse": (),
    "tcgnn": (),
    "sampled": (),
    "training": (),
    "plan": ("--graphs", "com-amazon,reddit", "--widths", "32x256,256x32"),
    "wallclock": ("--sections", "changing,eager,captured,loader,molecules,small"),
}


def run_all(argv: list[str]) -> int:
    """Run every benchmark in a process of its own; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks all")
    add_options(parser)
    options = parser.parse_args(argv)
    parse_device(options.device)
    cuda = options.device == "cuda"
    folder = options.out or RESULTS
    failed = []
    for name in _progress([*COMMANDS]):
        path = folder / f"{name}-{'gpu' if cuda else 'cpu'}.json"
        stamp = folder / f".{path.stem}.done"
        here = {key: _harness.machine(cuda=cuda).get(key) for key in MACHINE}
        if stamp.exists() and path.exists() and json.loads(stamp.read_text()) == here:
            print(f"{name}: skipped, {path} has this commit and machine")
            continue
        command = [sys.executable, "-m", "benchmarks", name, "--device", options.device]
        command += ["--quick"] if options.quick else COMMANDS[name]
        start = time.perf_counter()
        status = subprocess.run([*command, "--out", str(folder)], check=False).returncode
        print(f"{name}: {time.perf_counter() - start:.0f} s, status {status}", flush=True)
        if status:
            failed.append(name)
        elif not here["commit"].endswith("-dirty"):
            stamp.write_text(json.dumps(here) + "\n")
    print("failed: " + ", ".join(failed) if failed else "all right")
    return 1 if failed else 0


def _progress(names: list[str]) -> Iterator[str]:
    try:
        from rich.progress import track
    except ImportError:
        yield from names
        return
    yield from track(names, description="benchmarks")


def report(argv: list[str]) -> int:
    """Write docs/results.md from the JSON of a folder, and the claims of docs/papers.md.

    Figures are those with a limit, and means.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks report")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("-o", "--page", type=Path, default=ROOT / "docs" / "results.md")
    options = parser.parse_args(argv)
    lines = [
        "# Results of benchmarks",
        "",
        f"Written by `python -m benchmarks report`. Age is in commits; **old** is over {OLD}.",
        "",
        "| benchmark | figure | value | target | machine | commit | age |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    paths = sorted(options.out.glob("*.json"))
    if not paths:
        parser.error(f"{options.out} holds no .json file")
    for path in paths:
        for section, kept in sections(json.loads(path.read_text())).items():
            lines += _figures(f"{path.stem} {section}".strip(), kept)
    options.page.write_text("\n".join(lines) + "\n")
    print(f"wrote {options.page}")
    claims = options.page.with_name("papers.md")
    if claims.exists():
        write_claims(options.out, claims)
        print(f"wrote {claims}")
    return 0


def sections(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a result by name; none of what is no table, as digests."""
    sections: dict[str, dict[str, Any]] = result.get("sections", {})
    return sections


def _figures(title: str, kept: dict[str, Any]) -> list[str]:
    machine = kept["machine"]
    commit = machine["commit"].removesuffix("-dirty")
    count = age(commit)
    text = "unknown" if count is None else f"{count}, **old**" if count > OLD else str(count)
    if machine["commit"].endswith("-dirty"):
        text += ", dirty"
    where = f"{machine.get('device', machine['cpu'])} | {commit[:9]} | {text} |"
    figures = []
    for target in kept.get("targets", []):
        limit = ""
        if target["limit"] is None and "geomean" not in target["name"]:
            continue
        if target["limit"] is not None:
            sign = ">=" if target["at_least"] else "<="
            limit = f"{sign} {target['limit']:g}{'' if target['ok'] else ', missed'}"
        name = target["name"].replace("|", "/")
        figures.append(f"| {title} | {name} | {target['value']:.3g} | {limit} | {where}")
    return figures


def age(commit: str) -> int | None:
    """Return the number of commits since ``commit``; None if git does not know it."""
    command = ["git", "-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(result.stdout) if result.returncode == 0 else None


def compare(argv: list[str]) -> int:
    """Print the times of B that are beyond those of A by more than their spread; 1 if any."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(argv)
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    slow = list(slower(before, after))
    for text in slow:
        print(text)
    print(f"{len(slow)} slower beyond noise")
    return 1 if slow else 0


def slower(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each time in both that grew by more than noise.

    Noise is the sum of both spreads, and at least ``NOISE`` of the time before.
    """
    earlier = sections(before)
    for section, kept in sections(after).items():
        rows = {row["case"]: row for row in earlier.get(section, {}).get("rows", [])}
        for row in kept["rows"]:
            old = rows.get(row["case"], {})
            for name, ms in row.items():
                was = old.get(name)
                if not (name == "ms" or name.endswith("_ms")) or not was or ms is None:
                    continue
                spread = sum(r.get("spread", {}).get(name, 0.0) for r in (old, row))
                if ms - was > max(spread, NOISE * was):
                    text = f"{section} {row['case']} {name}".strip()
                    yield f"{text}: {was:.4g} -> {ms:.4g} ({ms / was:.2f}x, noise {spread:.2g})"


BENCHMARKS = {"all": run_all, "report": report, "compare": compare}
