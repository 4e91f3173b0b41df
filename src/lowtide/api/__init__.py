"""The verbs that people call, each joining the parts below."""

from lowtide.api._saved_bytes import SavedBytes, SavedColumn, saved_bytes
from lowtide.api._trace import trace
from lowtide.regions import Applied, apply, checkpoint_name

__all__ = ["Applied", "SavedBytes", "SavedColumn", "apply", "checkpoint_name", "saved_bytes", "trace"]
