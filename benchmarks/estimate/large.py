"""Whole steps of large models, estimated without a GPU: `python -m benchmarks.estimate.large [NAME ...]`.

Llama 3 shapes (Grattafiori et al. 2024, arXiv 2407.21783, table 3) in lowtide's decoder, sharded over one axis of a
mesh and split into tensor-parallel parts over the other; mixed precision, full checkpointing, AdamW, one sequence of
8,192 tokens a data-parallel rank. Each runs in a process of its own, since its largest memory counts.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide
from lowtide.training.loop import next_token_loss
from lowtide.training.model.kinds import DecoderConfig
from lowtide.units import format_bytes

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14336, "mesh": {"shard": 8}},
    "Llama-3-70B": {"dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 28672, "mesh": {"shard": 8, "tp": 8}},
    "Llama-3-405B": {"dim": 16384, "layers": 126, "heads": 128, "ffn_dim": 53248, "mesh": {"shard": 128, "tp": 8}},
}
LENGTH = 8192


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Columns and rows as Shoeybi et al. 2019 (arXiv 1909.08053) cut them; embedding and head by vocabulary."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i, block in enumerate(model.layers):
        block.attention.heads //= mesh.size()
        block.attention.kv_heads //= mesh.size()
        for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.output", "mlp.down"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def run(name: str) -> dict[str, Any]:
    """Estimate one model here."""
    shape = dict(SHAPES[name])
    mesh = shape.pop("mesh")
    started, worked = time.monotonic(), time.process_time()
    with torch.device("meta"):
        model = DecoderConfig(vocab_size=128256, kv_heads=8, **shape).build()
    targets = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return next_token_loss(logits, torch.zeros(1, LENGTH, dtype=torch.int64))

    setup = lowtide.TrainSetup(
        loss=loss, mesh=mesh, tensor_parallel=split, precision="bfloat16 mixed", device="H100", threads=1
    )
    found = lowtide.estimate(model, targets, policy=lowtide.Full(), setup=setup)
    assert found.time is not None
    return {
        "name": name,
        "mesh": mesh,
        "ranks": found.world_size,
        "peak_bytes": found.peak_bytes,
        "at_peak": found.at_peak.as_dict(),
        "peak": f"{found.peak_phase}, {found.peak_module} {found.peak_op}".strip(),
        "step_ms": found.time.step_ms,
        "communication_ms": found.time.communication_ms,
        "mfu": found.time.mfu,
        "hfu": found.time.hfu,
        "wall_s": time.monotonic() - started,
        "cpu_s": time.process_time() - worked,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": torch.__version__,
    }


def in_fresh_process(name: str) -> dict[str, Any]:
    """Estimate one model in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.estimate.large", "--here", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows as a Markdown table."""
    lines = [
        "| model | mesh | ranks | peak of a rank | step on H100 | MFU / HFU | wall time | processor time | memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        mesh = " x ".join(f"{axis} {size}" for axis, size in r["mesh"].items())
        lines.append(
            f"| {r['name']} | {mesh} | {r['ranks']} | {format_bytes(r['peak_bytes'])} | {r['step_ms'] / 1000:.2f} s | "
            f"{r['mfu']:.0%} / {r['hfu']:.0%} | {r['wall_s']:.0f} s | {r['cpu_s']:.0f} s | "
            f"{format_bytes(r['memory_bytes'])} |"
        )
    return lines


def main() -> None:
    names = sys.argv[1:]
    if names[:1] == ["--here"]:
        print(json.dumps(run(names[1])))
        return
    print("\n".join(table([in_fresh_process(name) for name in names or SHAPES])))


if __name__ == "__main__":
    main()
