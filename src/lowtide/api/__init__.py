"""The verbs that people call, each joining the parts below."""

from lowtide.regions import Applied, apply

__all__ = ["Applied", "apply"]
