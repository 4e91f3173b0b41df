"""What an executor costs: one training step of small Llama blocks under each, alternating in one process.

    python -m benchmarks.executors.run [--rounds 40] [--out docs/reference/executors.md]

One thread. Every round runs one step of every executor, so that what else the machine does falls on all of them;
times are the processor time of the thread, minima and medians over the rounds. Small blocks measure the overhead,
large ones show what is left of it.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide

SIZES = ((64, 16, 8), (128, 64, 4), (256, 256, 4))
PRODUCTS = ["aten.mm", "sdpa"]
EVERYTHING = [*PRODUCTS, "aten.mul", "aten.add", "aten.rsqrt", "aten.mean", "aten.pow", "aten.silu", "aten.neg",
              "aten.cat", "aten.clone"]  # fmt: skip


def _build(dim: int, layers: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=dim,
        intermediate_size=dim * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return transformers.LlamaModel(config)


def _torch_checkpoint(model: Any, *, selective: bool) -> None:
    saved = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}

    def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if func in saved else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": lambda: create_selective_checkpoint_contexts(decide)} if selective else {}
    for block in model.layers:
        block.forward = _around(block.forward, options)


def _around(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _policy(executor: str, save: list[str]) -> dict[str, Any]:
    if not save:
        return {"kind": "full", "executor": executor}
    rules = [{"op": op, "optional": op not in PRODUCTS} for op in save]
    return {"kind": "selective_op", "executor": executor, "save": rules}


EXECUTORS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda m: None,
    "torch, inputs": lambda m: _torch_checkpoint(m, selective=False),
    "torch, products": lambda m: _torch_checkpoint(m, selective=True),
    "recompute, inputs": lambda m: lowtide.apply(m, _policy("recompute", [])),
    "recompute, products": lambda m: lowtide.apply(m, _policy("recompute", PRODUCTS)),
    "replay, inputs": lambda m: lowtide.apply(m, _policy("replay", [])),
    "replay, products": lambda m: lowtide.apply(m, _policy("replay", PRODUCTS)),
    "replay, everything": lambda m: lowtide.apply(m, _policy("replay", EVERYTHING)),
}


def _step(model: nn.Module, x: Tensor) -> None:
    model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()
    model.zero_grad()


def measure(size: tuple[int, int, int], *, rounds: int) -> dict[str, list[float]]:
    """Times of every executor in ms, by round."""
    dim, length, layers = size
    x = torch.randn(1, length, dim)
    models = {name: _build(dim, layers) for name in EXECUTORS}
    for name, model in models.items():
        EXECUTORS[name](model)
        for _ in range(4):
            _step(model, x)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = time.thread_time()
            _step(model, x)
            times[name].append((time.thread_time() - start) * 1e3)
    return times


def _page(results: dict[tuple[int, int, int], dict[str, list[float]]], rounds: int) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    sizes = list(results)
    head = " | ".join(f"d{d}, {t} tokens, {n} layers" for d, t, n in sizes)
    lines = [
        "# What an executor costs",
        "",
        f"Made by `python -m benchmarks.executors.run` on {datetime.date.today()}, commit {commit}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, one thread of {platform.machine()}.",
        "",
        "One training step of Llama blocks in ms of processor time: the minimum, and the median in brackets, of "
        f"{rounds} rounds in which the executors take turns. `inputs` keeps each block's inputs, `products` also the "
        "results of matrix products and of attention, `everything` what backward needs. Small blocks show overhead.",
        "",
        f"| executor | {head} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for name in EXECUTORS:
        cells = [f"{min(r[name]):.1f} ({statistics.median(r[name]):.1f})" for r in results.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Ratios of the minima:", "", f"| | {head} |", "|---" * (len(sizes) + 1) + "|"]
    ratios = {
        "replay, products / torch, products": lambda t: t["replay, products"] / t["torch, products"],
        "the same, overhead over none": lambda t: (
            (t["replay, products"] - t["none"]) / (t["torch, products"] - t["none"])
        ),
        "replay, inputs / torch, inputs": lambda t: t["replay, inputs"] / t["torch, inputs"],
        "replay, everything / none": lambda t: t["replay, everything"] / t["none"],
    }
    for name, ratio in ratios.items():
        cells = [f"{ratio({k: min(v) for k, v in r.items()}):.2f}" for r in results.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/reference/executors.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    page = _page({size: measure(size, rounds=options.rounds) for size in SIZES}, options.rounds)
    options.out.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
