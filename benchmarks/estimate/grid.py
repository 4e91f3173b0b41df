"""The cells of the benchmark, and the config that each of them is."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lowtide.training.config import TrainConfig

_MODELS = Path(__file__).parent / "models"

MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"kind": "decoder", "vocab_size": 512, "dim": 128, "layers": 4, "heads": 4, "kv_heads": 2},
    "llama": {"kind": "huggingface", "config": str(_MODELS / "llama.json")},
    "gpt2": {"kind": "huggingface", "config": str(_MODELS / "gpt2.json")},
    "qwen3_moe": {"kind": "custom", "target": "benchmarks.estimate.parts:Experts"},
    "t5": {"kind": "custom", "target": "benchmarks.estimate.parts:SameTokens"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "full": {"kind": "full"},
    "every second": {"kind": "every_nth_layer", "n": 2},
    "selective_op": {"kind": "selective_op", "save": ["sdpa", {"op": "matmul", "keep": "1/2"}]},
    "rules": {
        "kind": "rules",
        "default": "save",
        "rules": [{"modules": ["mlp", "layer.*.DenseReluDense"], "action": "recompute", "optional": True}],
    },
}
SHAPES: dict[str, tuple[int, int]] = {"4x128": (4, 128), "2x512": (2, 512)}
"""Batch of a process, and tokens of a sequence."""

PRECISIONS: dict[str, dict[str, str]] = {"fp32": {}, "bf16 mixed": {"compute": "bfloat16"}}
PROCESSES = (1, 2)


@dataclass(frozen=True)
class Cell:
    model: str
    policy: str
    batch: int
    length: int
    precision: str
    processes: int
    accumulation: int = 1

    def __str__(self) -> str:
        parts = [self.model, self.policy, f"{self.batch}x{self.length}", self.precision, f"{self.processes}p"]
        return "-".join([*parts, *([f"acc{self.accumulation}"] if self.accumulation > 1 else [])]).replace(" ", "_")

    def config(self) -> TrainConfig:
        """The training config of this cell; one process in float32 runs unsharded, all others under FSDP2."""
        sharding = "none" if self.processes == 1 and self.precision == "fp32" else "fsdp2"
        return TrainConfig.model_validate(
            {
                "model": MODELS[self.model],
                "data": {
                    "kind": "random",
                    "vocab_size": 512,
                    "batch_size": self.batch,
                    "sequence_length": self.length,
                },
                "policy": POLICIES[self.policy],
                "sharding": {"kind": sharding},
                "precision": PRECISIONS[self.precision],
                "training": {"steps": 4, "grad_accumulation": self.accumulation},
                "launch": {"threads": 1},
            }
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def whole_grid() -> list[Cell]:
    """Every combination."""
    return [
        Cell(model, policy, *SHAPES[shape], precision, processes)
        for model, policy, shape, precision, processes in product(MODELS, POLICIES, SHAPES, PRECISIONS, PROCESSES)
    ]


def drawn_grid(seed: int, count: int) -> list[Cell]:
    """Cells of other shapes, and with accumulation, drawn at random by seed."""
    chance = random.Random(seed)
    return [
        Cell(
            chance.choice(list(MODELS)),
            chance.choice(list(POLICIES)),
            chance.choice((1, 2, 3, 5, 6)),
            chance.choice((48, 96, 160, 200, 256, 384, 640)),
            chance.choice(list(PRECISIONS)),
            chance.choice(PROCESSES),
            chance.choice((1, 1, 2, 3)),
        )
        for _ in range(count)
    ]


def slice_of(cells: list[Cell], seed: int, count: int) -> list[Cell]:
    """A few cells, the same for the same seed."""
    return random.Random(seed).sample(cells, count)
