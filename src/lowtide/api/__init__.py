"""The verbs that people call, each joining the parts below."""

from lowtide.api._estimate import TrainSetup, estimate
from lowtide.api._inspect import inspect
from lowtide.api._measure import measure
from lowtide.api._plan import plan
from lowtide.api._planned import apply, as_policy
from lowtide.api._saved_bytes import SavedBytes, SavedColumn, saved_bytes
from lowtide.api._trace import trace
from lowtide.regions import Applied, checkpoint_name

__all__ = [
    "Applied",
    "SavedBytes",
    "SavedColumn",
    "TrainSetup",
    "apply",
    "as_policy",
    "checkpoint_name",
    "estimate",
    "inspect",
    "measure",
    "plan",
    "saved_bytes",
    "trace",
]
