"""Causal language models of the transformers library, offline and without strangers' code.

A config file is read by us and handed to the config class of the installed transformers, so that ``auto_map``
(a folder's own Python) is never followed. Weights come from safetensors only: other formats are pickles,
which run code when they are read. The key/value cache is off, since training never uses it and a cache that
grows in forward grows again in recompute; attention goes through ``scaled_dot_product_attention``;
parameters are float32, whatever the file says, because precision is the trainer's to decide.

Checked on transformers 5.24. A model class that does not support scaled_dot_product_attention is refused.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.errors import InputError, listing, nearest

__all__ = ["build_from_config", "build_from_directory"]

_LOG = logging.getLogger(__name__)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")


def build_from_config(path: Path) -> nn.Module:
    """Make the model that a ``config.json`` describes, with random weights.

    Raises:
        InputError: the file is missing, is not JSON, names no known model type or has values out of range.
    """
    config = _read_config(path)
    auto = _transformers().AutoModelForCausalLM
    try:
        return auto.from_config(config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False)
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"{path}: {_first_lines(error)}{_hint(error)}") from error


def build_from_directory(directory: Path) -> nn.Module:
    """Make the model of a local folder and load its safetensors weights.

    Raises:
        InputError: besides the reasons of ``build_from_config``: no safetensors in the folder, a damaged
            file, or weights that do not fit the model.
    """
    config = _read_config(directory / "config.json")
    _check_weights(directory)
    if _only_shapes():
        return build_from_config(directory / "config.json")
    try:
        model, told = _transformers().AutoModelForCausalLM.from_pretrained(
            str(directory),
            config=config,
            attn_implementation="sdpa",
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise InputError(f"{directory}: the weights cannot be loaded: {_first_lines(error)}") from error
    _check_loading(directory, told)
    return cast("nn.Module", model).train()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "models of kind huggingface need the transformers library: pip install 'lowtide[train]'"
        ) from error
    return transformers


def _only_shapes() -> bool:
    probe = torch.empty(0)
    return isinstance(probe, FakeTensor) or probe.is_meta


def _read_config(path: Path) -> Any:
    data = _read_json(path)
    known = _transformers().CONFIG_MAPPING
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        near = nearest(str(kind), list(known.keys()))
        own_code = " The folder's own code (`auto_map`) is never run." if "auto_map" in data else ""
        raise InputError(
            f"{path}: model_type {kind!r} is not one that the installed transformers "
            f"{_transformers().__version__} knows.{own_code} Nearest: {listing(near) or 'none'}"
        )
    try:
        config = known[kind].from_dict({k: v for k, v in data.items() if k != "auto_map"})
    except Exception as error:
        raise InputError(f"{path}: {_first_lines(error)}") from error
    config.use_cache = False
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise InputError(f"{path} is a folder: name its config.json, or give it as `directory` to load its weights")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: a model's config.json holds a mapping, this one a {type(data).__name__}")
    return data


def _check_weights(directory: Path) -> None:
    names = sorted(p.name for p in directory.iterdir() if p.is_file())
    if any(n.endswith(".safetensors") for n in names):
        return
    pickles = [n for n in names if n.endswith(_PICKLES)]
    if pickles:
        raise InputError(
            f"{directory}: the weights ({listing(pickles)}) are not safetensors; reading them would run "
            f"code from the file, so they are refused. Convert them once, where you trust them: "
            f"model.save_pretrained(folder, safe_serialization=True)"
        )
    raise InputError(
        f"{directory}: no *.safetensors among its files ({listing(names) or 'it is empty'}); for random "
        f"weights give its config.json as `config`"
    )


def _check_loading(directory: Path, told: dict[str, Any]) -> None:
    missing = sorted(told.get("missing_keys") or ())
    mismatched = sorted(str(m[0]) if isinstance(m, tuple) else str(m) for m in told.get("mismatched_keys") or ())
    problems = [f"missing: {listing(missing)}"] if missing else []
    problems += [f"of another shape: {listing(mismatched)}"] if mismatched else []
    if problems:
        raise InputError(
            f"{directory}: the weights do not fill the model that config.json describes ({'; '.join(problems)})"
        )
    unexpected = sorted(told.get("unexpected_keys") or ())
    if unexpected:
        _LOG.warning("%s: the model has no place for %s; they were not loaded", directory, listing(unexpected))


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])
    return text if len(text) <= 400 else f"{text[:400]}..."


def _hint(error: BaseException) -> str:
    text = str(error)
    if "Unrecognized configuration class" in text:
        return " (this model type has no causal language model)"
    return ""
