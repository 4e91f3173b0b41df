"""What ``lowtide doctor`` asks in processes of their own: ``python -m lowtide.cli._doctor_probe QUESTION``.

Why: an import of torch can fail in ways that end the process (a library built for another machine), and a group of
processes can hang. Questions: ``torch`` prints one line of JSON; ``group cpu|cuda`` is one rank of a check.
"""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["describe_torch", "main"]


def describe_torch() -> dict[str, Any]:
    """Import torch and say what it is and what it sees; a failure is part of the answer."""
    try:
        import torch
        import torch.distributed as dist
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "gpus": [],
        "gpu_problem": None,
    }
    try:
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            seen = torch.cuda.get_device_properties(index)
            found["gpus"].append(
                {"name": seen.name, "total_bytes": int(seen.total_memory), "capability": f"{seen.major}.{seen.minor}"}
            )
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except Exception as error:
        found["gpu_problem"] = f"{type(error).__name__}: {error}"
    return found


def check_group(device: str) -> None:
    """Add numbers up over all ranks, as every training step does.

    Raises:
        RankError: the ranks do not find each other, or the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    from lowtide.errors import RankError
    from lowtide.training.mesh import process_group

    with process_group(30, device="cuda" if device == "cuda" else "cpu") as world:
        total = torch.tensor([float(world.rank + 1)], device=world.device)
        dist.all_reduce(total)
        wanted = world.world_size * (world.world_size + 1) / 2
        if total.item() != wanted:
            raise RankError(f"all_reduce over {world.world_size} ranks gave {total.item()}, expected {wanted}")


def main(arguments: list[str]) -> int:
    """Answer one question."""
    if arguments[0] == "group":
        from lowtide.training.rank_status import run_rank

        return run_rank(lambda: check_group(arguments[1]))
    print(json.dumps(describe_torch()))  # noqa: T201 - the answer, for the process that asked
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
