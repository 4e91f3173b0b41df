"""Which versions made a record."""

from __future__ import annotations

import platform
import sys

import torch

from lowtide.records import Environment


def environment() -> Environment:
    """Say which versions are running."""
    return Environment(
        torch=torch.__version__, python=platform.python_version(), lowtide=sys.modules["lowtide"].__version__
    )
