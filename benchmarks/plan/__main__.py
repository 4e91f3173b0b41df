"""Compare exact choices with those that people use: ``python -m benchmarks.plan [name ...]``.

Writes the part on planning of ``docs/reference/benchmarks.md`` when all architectures were asked for.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

import lowtide
from benchmarks.plan.compare import PEERS, Comparison, Result, compare
from benchmarks.plan.models import ARCHITECTURES, Architecture, calls_of
from lowtide.planning import Choice, Kind, Step, assign, frontier_of, graph_of
from lowtide.prediction import find_device
from lowtide.prediction._classes import SHARES
from lowtide.records import OpTrace
from lowtide.units import format_bytes

DEVICE = "H100"
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "benchmarks.md"
_BEGIN, _END = "<!-- plan: begin -->", "<!-- plan: end -->"


def main(names: list[str]) -> int:
    found: list[tuple[Architecture, Comparison]] = []
    whole: list[str] = []
    for architecture in ARCHITECTURES:
        if names and not any(name.lower() in architecture.name.lower() for name in names):
            continue
        for name, call in calls_of(architecture).items():
            started = time.perf_counter()
            trace = lowtide.trace(call.block, call.args, call.kwargs, device=DEVICE)
            traced = time.perf_counter() - started
            comparison = compare(name, trace, DEVICE)
            found.append((architecture, comparison))
            print(architecture.name, name, f"{traced:.1f} s traced, {comparison.search_s:.2f} s searched", flush=True)
            for result in comparison.results:
                print("   ", _line(result), flush=True)
            if "TP 8" in architecture.name:
                whole = _whole_model(trace, traced)
                print("\n".join(whole), flush=True)
    worse = [r for _, c in found for r in c.results if r.less_time < 0 or r.fewer_bytes < 0]
    if not names:
        _write(_section(found, whole))
    print(f"{len(worse)} comparisons in which the exact choice is worse")
    return 1 if worse else 0


def _line(result: Result) -> str:
    peer = result.peer
    held = format_bytes(peer.held_bytes / 2)
    return (
        f"{result.executor:9} {peer.name:18} {held:>11} {peer.recompute_ns / 2e6:8.3f} ms: "
        f"{result.less_time:6.1%} less time at its bytes, {result.fewer_bytes:6.1%} fewer bytes at its time"
    )


def _whole_model(trace: OpTrace, traced_s: float) -> list[str]:
    """Plan 126 layers on 128 shards: the search from the block's trace, at three limits."""
    layers, shards = 126, 128
    argument = [s.id for s in trace.storages if s.role == "argument" and s.name in ("0", "hidden_states")][:1]
    parameters = sum(s.nbytes for s in trace.storages if s.role == "parameter")
    started = time.perf_counter()
    graph = graph_of(trace, DEVICE, counted=argument)
    points = frontier_of(graph, "replay").points
    # Shards in float32 with two states of the optimizer; gradients appear as backward goes; two layers are gathered.
    numbers = parameters // 2
    shard, gathered = numbers * 4 // shards, 2 * parameters
    logits = 8192 * (128256 // 8) * (2 + 4 + 4)
    persistent = layers * shard * 3 + gathered
    base = [persistent + (layers - 1 - i) * shard for i in range(layers)]
    most = max(p.held_bytes for p in points)
    kind = Kind("block", tuple(Choice(p.held_bytes, most - p.saved_bytes, p.recompute_ns) for p in points))
    step = Step((kind,), (0,) * layers, tuple(base), persistent + logits)
    lines: list[str] = []
    for gib in (48, 64, 78):
        again = time.perf_counter()
        assigned = assign(step, gib * 2**30)
        took = time.perf_counter() - again
        if assigned is None:
            lines.append(f"| {gib} GiB | nothing fits | | | {took:.2f} |")
            continue
        proof = "proven best" if assigned.bound_ns == assigned.recompute_ns else f"{assigned.bound_ns / 1e6:.1f} ms"
        shape = ", ".join(str(n) for _, n in sorted(Counter(assigned.chosen).items()))
        lines.append(f"| {gib} GiB | {assigned.recompute_ns / 1e6:.1f} ms | {proof} | {shape} | {took:.2f} |")
    total = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [
        f"Trace {traced_s:.1f} s; the search at all three limits {total:.1f} s, one thread; the process held "
        f"{format_bytes(peak)} at most, torch and transformers included.",
        "",
        "| limit | recompute of all layers | no choice is faster than | layers of each choice | seconds |",
        "|---|---|---|---|---|",
        *lines,
    ]


def _section(found: list[tuple[Architecture, Comparison]], whole: list[str]) -> list[str]:
    device = find_device(DEVICE)
    assert device.low_precision_flops is not None
    assert device.bytes_per_s is not None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return [
        "## What an exact choice is worth, on traces",
        "",
        "`python -m benchmarks.plan` writes this part. Blocks at full size in bfloat16, traced under fake tensors for "
        f"an {DEVICE}; nothing was run on a GPU. Times are a roofline: {device.low_precision_flops / 1e12:.0f} TFLOP/s "
        f"of matrix products of which {SHARES['matmul']:.0%} are reached, attention at {SHARES['attention']:.0%}, "
        f"{device.bytes_per_s / 1e9:.0f} GB/s of which element-wise operators reach {SHARES['pointwise']:.0%} and "
        f"reductions {SHARES['reduction']:.0%}, and at least {_launch()} µs an operator. Bytes are what a layer holds "
        "from forward to backward, its input included. Peers are carried out by torch's checkpointing, as they are "
        "today, and hold what its caches hold, in vain too (the last product of a block); `torchtitan` is lowtide's "
        "preset of its list, with addmm in the place of mm where projections have a bias. *less time*: recompute time "
        "saved by the fastest exact choice that holds no more than the peer; *fewer bytes*: bytes saved by the "
        "smallest one that takes no longer. Two layers are chosen at once, as *every second layer* needs.",
        "",
        *_medians(found),
        "",
        *_table(found, "replay"),
        "",
        *_table(found, "recompute"),
        "",
        "### Llama-3 405B, 126 layers",
        "",
        *whole,
        "",
        "Choices for attention, products and norms of one of 8 tensor-parallel ranks, without its collectives; 128 "
        "shards; transient bytes are taken to be those of the whole block in every choice.",
        "",
        f"commit {commit.stdout.strip()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{datetime.now(UTC):%Y-%m-%d}",
    ]


def _launch() -> str:
    from lowtide.prediction import speeds_of

    return f"{speeds_of(DEVICE).operator_ms * 1000:.0f}"


def _of(found: list[tuple[Architecture, Comparison]], executor: str, peer: str) -> list[Result]:
    return [r for _, c in found for r in c.results if r.executor == executor and r.peer.name == peer]


def _medians(found: list[tuple[Architecture, Comparison]]) -> list[str]:
    lines = [
        "| executor of the plan | beside | less time: median (least to most) | fewer bytes: median (least to most) |",
        "|---|---|---|---|",
    ]
    for executor in ("replay", "recompute"):
        for peer in PEERS:
            results = _of(found, executor, peer)
            cells = []
            for values in ([r.less_time for r in results], [r.fewer_bytes for r in results]):
                cells.append(f"{statistics.median(values):.0%} ({min(values):.0%} to {max(values):.0%})")
            lines.append(f"| {executor} | {peer} | {' | '.join(cells)} |")
    return lines


def _table(found: list[tuple[Architecture, Comparison]], executor: str) -> list[str]:
    lines = [
        f"### By block, plans carried out by `{executor}`",
        "",
        "| model | block | batch x tokens | forward ms | none | "
        + " | ".join(f"{peer}: held, ms | less time, fewer bytes" for peer in PEERS)
        + " | search s |",
        "|" + "---|" * (6 + 2 * len(PEERS)),
    ]
    for architecture, comparison in found:
        cells = [
            architecture.name,
            comparison.block.rsplit(": ", 1)[-1],
            f"{architecture.batch} x {architecture.tokens}",
            f"{comparison.forward_ms:.2f}",
            format_bytes(comparison.none_bytes),
        ]
        for result in comparison.results:
            if result.executor != executor:
                continue
            peer = result.peer
            cells.append(f"{format_bytes(peer.held_bytes / 2)}, {peer.recompute_ns / 2e6:.2f}")
            cells.append(f"{result.less_time:.0%}, {result.fewer_bytes:.0%}")
        lines.append(f"| {' | '.join(cells)} | {comparison.search_s:.2f}{'' if comparison.exact else ', thinned'} |")
    return lines


def _write(section: list[str]) -> None:
    """Put the section between its marks; what else stands on the page stays."""
    text = _PAGE.read_text(encoding="utf-8") if _PAGE.exists() else f"# Benchmarks\n\n{_BEGIN}\n{_END}\n"
    if _BEGIN not in text:
        text = f"{text.rstrip()}\n\n{_BEGIN}\n{_END}\n"
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _PAGE.write_text(f"{before}{_BEGIN}\n" + "\n".join(section) + f"\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
