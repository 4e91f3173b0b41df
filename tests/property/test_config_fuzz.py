"""No input gives a traceback: whatever the file, the overrides and the environment, a config or an error for users."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lowtide.errors import UserError
from lowtide.training.config import LoadedConfig, TrainConfig, load, to_yaml
from tests.helpers.configs import Assembly

_FOLDER = Path(tempfile.mkdtemp(prefix="lowtide-fuzz-"))
_WORDS = [
    *TrainConfig.model_fields, "kind", "decoder", "random", "adamw", "custom", "target", "config", "full", "save",
    "selective_op", "some_layers", "checkpoint", "op", "keep", "1/2", "layers", "n", "trackers", "steps", "lr",
    "warmup_steps", "${training.steps}", "${model}", "${run.name}", "${env:FUZZ}", "${env:NONE:-3}", "$${", "${",
    "<<", "", "a.b", "os:system", "-", "~", "3e-4", ".inf",
]  # fmt: skip
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(_WORDS),
    st.text(max_size=12),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_WORDS) | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
_REFERENCES = st.sampled_from(
    [
        "${numbers.count}",
        "${free}",
        "${free.a}",
        "${free.b.0}",
        "${first}",
        "${many.0}",
        "${env:FUZZ}",
        "x${free.a}",
        "${numbers.rate}y",
    ]
)
_PATHS = st.sampled_from(
    ["run.name", "training.steps", "policy.kind", "logging.trackers.0.kind", "a.b", "model", "", "[0]"]
)


def _outcome(model: Any, data: bytes, overrides: list[str] | None = None) -> LoadedConfig[Any] | str:
    path = _FOLDER / f"{os.getpid()}.yaml"
    path.write_bytes(data)
    try:
        return load(model, path, overrides or (), allow_code=False, environment={"FUZZ": "hidden-from-all"})
    except UserError as error:
        said = str(error)
    assert said.strip(), "an error without a message"
    assert "hidden-from-all" not in said
    return said


def _check(outcome: LoadedConfig[Any] | str, model: Any) -> None:
    """What loads can be written, and the written text loads to the same."""
    if isinstance(outcome, str):
        return
    text = to_yaml(outcome.resolved)
    assert "hidden-from-all" not in text
    json.dumps(outcome.resolved)
    again = _outcome(model, text.encode())
    assert not isinstance(again, str), f"{again}\n{text}"
    assert to_yaml(again.resolved) == text


_slow = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@_slow
@given(st.binary(max_size=200))
@example(b"\xff\xfe\x00")
@example(b"%YAML 99999999999999999999999.1\n---\na")
@example(b'a: "\\UFFFFFFFF"')
@example(b"? ? ? a")
@example(b"- - - - &a *a")
@example(b"!!!!: !")
@example(b"a: !!binary x")
@example(b"\xef\xbb\xbfrun: {}")
def test_any_bytes(data: bytes) -> None:
    _check(_outcome(TrainConfig, data), TrainConfig)


@_slow
@given(st.text(alphabet="ab01:-[]{}&*!|>'\"%#,?.~$ \n\t", max_size=60))
def test_any_text_of_yaml_signs(text: str) -> None:
    _check(_outcome(Assembly, text.encode()), Assembly)


@_slow
@given(st.dictionaries(st.sampled_from(_WORDS), _VALUES, max_size=6))
def test_any_mapping_of_familiar_words(mapping: dict[str, Any]) -> None:
    mapping = {"model": {"kind": "decoder"}, "data": {"kind": "random"}, **mapping}
    text = yaml.safe_dump(mapping, allow_unicode=True)
    _check(_outcome(TrainConfig, text.encode("utf-8", "surrogatepass")), TrainConfig)


@_slow
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "numbers": st.dictionaries(
                st.sampled_from(["count", "rate", "name", "on", "sizes"]), _REFERENCES | _SCALARS
            ),
            "free": _REFERENCES
            | st.dictionaries(st.sampled_from("ab"), _REFERENCES | st.lists(_REFERENCES | _VALUES, max_size=3)),
            "first": _REFERENCES | st.just({"kind": "leaf"}),
            "second": _REFERENCES | st.just({"kind": "tree", "left": "${first}", "right": "${many.0}"}),
            "many": st.lists(_REFERENCES | st.just({"kind": "leaf", "label": "${env:FUZZ}"}), max_size=3),
        },
    )
)
@example({"free": {"a": "${free.b}", "b": "${free}"}})
@example({"free": {"a": [{"\x85": "a\u2028b\tc\n"}]}})
@example({"first": "${second}", "second": {"kind": "tree", "left": "${first}", "right": "${first}"}})
def test_any_web_of_references(mapping: dict[str, Any]) -> None:
    _check(_outcome(Assembly, yaml.safe_dump(mapping).encode()), Assembly)


@_slow
@given(
    st.lists(
        st.builds("{}={}".format, _PATHS | st.text(max_size=8), st.text(max_size=10)) | st.text(max_size=10), max_size=3
    )
)
def test_any_overrides(overrides: list[str]) -> None:
    _check(_outcome(TrainConfig, b"model: {kind: decoder}\ndata: {kind: random}\n", overrides), TrainConfig)
