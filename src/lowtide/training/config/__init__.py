"""A training run as values: read from YAML, checked, and written down again. No torch.

text ─► _document ─► _overrides ─► _references ─► _sections ─► TrainConfig ─► _written
        lines kept    --set         ${...}         pydantic                   YAML, hash
                                        └─ _explain, _fields: every error as file, line, path, legal, nearest
"""

from __future__ import annotations

from lowtide.training.config._load import LoadedConfig, load, load_config
from lowtide.training.config._page import reference_page
from lowtide.training.config._sections import TrainConfig
from lowtide.training.config._written import config_hash, to_yaml

__all__ = ["LoadedConfig", "TrainConfig", "config_hash", "load", "load_config", "reference_page", "to_yaml"]
