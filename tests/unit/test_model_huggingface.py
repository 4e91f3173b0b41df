"""Models of transformers: offline, no cache, no strangers' code, no pickles."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.errors import InputError
from lowtide.training.model.flops import matmul_weights, model_flops_per_token
from lowtide.training.model.forward import forward_logits, vocabulary_size
from lowtide.training.model.kinds import HuggingFaceConfig

pytest.importorskip("transformers")

CONFIGS = Path(__file__).parents[1] / "data" / "hf"
KINDS = ["llama", "qwen3", "gpt2", "gemma"]


def _config(kind: str) -> Path:
    return CONFIGS / kind / "config.json"


def _changed(kind: str, folder: Path, **changes: object) -> Path:
    data = {**json.loads(_config(kind).read_text()), **changes}
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_gives_a_trainable_model_without_network(kind, no_network):
    model = HuggingFaceConfig(config=_config(kind)).build()
    tokens = torch.randint(0, 256, (2, 12))
    logits = forward_logits(model, tokens)
    assert logits.shape == (2, 12, 256)
    assert logits.dtype == torch.float32
    assert model.training
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"
    assert model(tokens).past_key_values is None
    logits.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert vocabulary_size(model) == 256


@pytest.mark.parametrize(
    ("kind", "products"),
    [
        ("llama", 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 256 * 32),
        ("qwen3", 3 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 64) + 256 * 32),
        ("gpt2", 3 * (4 * 32 * 32 + 2 * 32 * 128) + 256 * 32),
        ("gemma", 3 * (2 * 32 * 64 + 2 * 32 * 16 + 3 * 32 * 64) + 256 * 32),
    ],
)
def test_flops_follow_the_weights_of_the_products(kind, products):
    model = HuggingFaceConfig(config=_config(kind)).build()
    width = 32 if kind in ("llama", "gpt2") else 64
    assert matmul_weights(model) == products
    assert model_flops_per_token(model, sequence_length=100) == 6 * products + 12 * 3 * width * 100


@pytest.mark.parametrize("kind", KINDS)
def test_models_can_be_made_under_fake_tensors(kind):
    with FakeTensorMode():
        model = HuggingFaceConfig(config=_config(kind)).build()
        assert forward_logits(model, torch.randint(0, 256, (2, 8))).shape == (2, 8, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_back_the_weights_that_were_saved(kind, tmp_path, no_network):
    saved = HuggingFaceConfig(config=_config(kind)).build()
    saved.save_pretrained(tmp_path)
    loaded = HuggingFaceConfig(directory=tmp_path).build()
    assert loaded.training
    tokens = torch.randint(0, 256, (2, 9))
    assert torch.equal(forward_logits(loaded.eval(), tokens), forward_logits(saved.eval(), tokens))
    assert loaded.config.use_cache is False


def test_under_fake_tensors_weights_are_not_read(tmp_path):
    shutil.copy(_config("llama"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with FakeTensorMode():
        HuggingFaceConfig(directory=tmp_path).build()
    with pytest.raises(InputError, match="cannot be loaded"):
        HuggingFaceConfig(directory=tmp_path).build()


def test_pickled_weights_are_refused_unread(tmp_path):
    shutil.copy(_config("llama"), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"would run code")
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*not safetensors.*Convert them"):
        HuggingFaceConfig(directory=tmp_path).build()


def test_a_folder_without_weights_says_what_it_holds(tmp_path):
    shutil.copy(_config("llama"), tmp_path)
    with pytest.raises(InputError, match=r"no \*\.safetensors among its files \(config\.json\)"):
        HuggingFaceConfig(directory=tmp_path).build()


def test_weights_that_leave_a_hole_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    HuggingFaceConfig(config=_config("llama")).build().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        HuggingFaceConfig(directory=tmp_path).build()


def test_code_of_the_folder_is_never_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    path = _changed("llama", tmp_path, auto_map=own)
    assert type(HuggingFaceConfig(config=path).build()).__name__ == "LlamaForCausalLM"
    path = _changed("llama", tmp_path, auto_map=own, model_type="evil")
    with pytest.raises(InputError, match=r"'evil' is not one that.*own code \(`auto_map`\) is never run"):
        HuggingFaceConfig(config=path).build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "Nearest: llama"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "t5"}, "no causal language model"),
    ],
)
def test_a_config_that_makes_no_model_is_explained(changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        HuggingFaceConfig(config=_changed("llama", tmp_path, **changes)).build()


def test_files_that_are_not_there_or_not_json_are_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: cannot be read: No such file"):
        HuggingFaceConfig(config=tmp_path / "none.json").build()
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match=r"bad\.json: is not JSON"):
        HuggingFaceConfig(config=tmp_path / "bad.json").build()
    with pytest.raises(InputError, match="is a folder"):
        HuggingFaceConfig(config=tmp_path).build()


@pytest.mark.parametrize("fields", [{}, {"config": "a", "directory": "b"}])
def test_exactly_one_source_is_given(fields):
    with pytest.raises(ValidationError, match="exactly one of"):
        HuggingFaceConfig(**fields)
