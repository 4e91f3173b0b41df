"""What a run was expected to need, beside what it needed.

    before the process group ─► rank 0: estimate of its own step ─► Forecast
    at the end               ─► measured peak, bytes of parameters and optimizer states ─► Comparison, a warning if off

The estimate makes a fake process group, so it comes before the real one; the other ranks wait for rank 0 there. It is
told beside the training, never instead of it: where there is none, a note says why.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError
from lowtide.training.summary import ForecastRow
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.training.build import Built
    from lowtide.training.config import TrainConfig
    from lowtide.training.mesh import Place

__all__ = ["Forecast", "compare", "forecast", "torch_device_name"]

_LOG = logging.getLogger(__name__)
_TOLERANCE = 0.05
_REST = "activations, gradients and buffers"


@dataclass(frozen=True)
class Forecast:
    """The estimate of rank 0's second step, or why there is none."""

    peak_bytes: int | None
    categories: Mapping[str, int]
    """Bytes at the peak by what they are for."""
    phase: str = ""
    step_ms: float | None = None
    """None where nothing but a nominal device could price it."""
    seconds: float = 0.0
    """How long the estimate took."""
    note: str = ""


def forecast(config: TrainConfig, place: Place) -> Forecast:
    """Estimate the step of this run, on rank 0 and before the process group is made."""
    import torch

    started = time.monotonic()
    if config.compile:
        return Forecast(None, {}, note="compiled code is not estimated")
    on_gpu = torch.cuda.is_available()
    try:
        device = torch_device_name()
        from lowtide.training.estimate import estimate_config

        found = estimate_config(config, world_size=place.world_size, rank=place.rank, device=device)
    except Exception as error:
        kind = "" if isinstance(error, LowtideError) else f"{type(error).__name__}: "
        return Forecast(None, {}, seconds=time.monotonic() - started, note=f"{kind}{error}")
    return Forecast(
        found.peak_bytes,
        found.at_peak.as_dict(),
        found.peak_phase,
        found.step_ms if on_gpu else None,
        time.monotonic() - started,
    )


def torch_device_name() -> str:
    """Return what the table of devices calls the one that torch computes on here.

    Raises:
        UserError: a GPU that the table does not know.
    """
    import torch

    from lowtide.errors import UserError
    from lowtide.prediction import match_device

    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name()
    known = match_device(name)
    if known is None:
        raise UserError(f"the device table does not know {name!r}")
    return known


def compare(expected: Forecast, measured_bytes: int | None, built: Built) -> ForecastRow:
    """Put the estimate beside what rank 0 measured; warn where they are more than 5% apart."""
    if expected.peak_bytes is None:
        return ForecastRow(None, measured_bytes, None, "", "", {}, {}, expected.seconds, expected.note)
    real = _static_bytes(built)
    predicted = {name: expected.categories[name] for name in real}
    predicted[_REST] = expected.peak_bytes - sum(predicted.values())
    error: float | None = None
    worst = ""
    if measured_bytes:
        real[_REST] = measured_bytes - sum(real.values())
        error = (expected.peak_bytes - measured_bytes) / measured_bytes
        worst = max(real, key=lambda name: abs(predicted[name] - real[name]))
        if abs(error) > _TOLERANCE:
            _LOG.warning("%s", _warning(expected.peak_bytes, measured_bytes, error, worst, predicted, real))
    return ForecastRow(
        expected.peak_bytes,
        measured_bytes,
        error,
        worst if error is not None and abs(error) > _TOLERANCE else "",
        expected.phase,
        predicted,
        real if measured_bytes else {},
        expected.seconds,
        "",
    )


def _static_bytes(built: Built) -> dict[str, int]:
    """Count what lies in parameters and optimizer states on this rank."""
    from lowtide.measurement import places_in

    def nbytes(things: Any) -> int:
        return sum(storage.nbytes() for storage, _ in places_in(things))

    # The optimizer's are shards, also while evaluation has left some parameters gathered.
    trained = [p for group in built.optimizer.param_groups for p in group["params"]]
    frozen = [p for p in built.model.parameters() if not p.requires_grad]
    return {
        "parameters": nbytes([*trained, *frozen, *built.model.buffers()]),
        "optimizer_state": nbytes(list(built.optimizer.state.values())),
    }


def _warning(
    predicted: int, measured: int, error: float, worst: str, parts: Mapping[str, int], real: Mapping[str, int]
) -> str:
    direction = "more" if error > 0 else "less"
    name = worst.replace("_", " ")
    assert math.isfinite(error)
    return (
        f"the estimate said {format_bytes(predicted)} and the peak was {format_bytes(measured)}: {abs(error):.1%} "
        f"{direction}. Most of the difference is in {name}: {format_bytes(parts[worst])} predicted, "
        f"{format_bytes(real[worst])} measured"
    )
