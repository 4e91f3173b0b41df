"""lowtide.inspect: every tensor that backward needs, what a policy does with it and why; equal to what is held."""

from __future__ import annotations

import inspect as signatures
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmarks.zoo.architectures import ARCHITECTURES
from torch import Tensor, nn

import lowtide
from lowtide.cli import run
from lowtide.errors import NothingMatchedError, RefusedError
from lowtide.measurement import measure_saved_bytes
from lowtide.policy import Block, parse_policy, resolve
from lowtide.reports import write_inspect_page
from tests.helpers import families, models
from tests.helpers.configs import write
from tests.helpers.documents import ROOT, blocks

SPEC = models.Spec(layers=3)
_SDPA = {"op": "sdpa", "optional": True}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "full": {"kind": "full"},
    "full, replay": {"kind": "full", "executor": "replay"},
    "selective": {"kind": "selective_op", "save": [_SDPA, {"op": "matmul", "keep": "1/2"}]},
    "selective, replay": {
        "kind": "selective_op",
        "executor": "replay",
        "save": [_SDPA, {"op": "matmul", "keep": "1/2"}],
    },
    "rules that save": {
        "kind": "rules",
        "default": "recompute",
        "rules": [{"op": "aten.add", "action": "save"}, {"op": "matmul", "action": "save", "keep": [0, 2]}],
    },
    "rules that recompute": {
        "kind": "rules",
        "default": "save",
        "rules": [
            {"op": "aten.mul", "action": "recompute", "optional": True},
            {"op": "aten.add", "action": "recompute"},
        ],
    },
    "rules that recompute, executor recompute": {
        "kind": "rules",
        "default": "save",
        "executor": "recompute",
        "rules": [{"op": "aten.add", "action": "recompute"}],
    },
    "every second layer": {"kind": "every_nth_layer", "n": 2},
}


def held_for_real(
    model: nn.Module, forward: Callable[[], Tensor], policy: object, blocks: list[str]
) -> tuple[list[int], int]:
    """Bytes by block, and of the rest, that a second step holds on real tensors."""
    applied = lowtide.apply(model, policy)
    try:
        if applied.regions:
            forward().sum().backward()
            model.zero_grad()
        measured = measure_saved_bytes(model, forward, blocks)
    finally:
        applied.remove()
    return [block.saved_bytes for block in measured.blocks], measured.rest_bytes


def check(model: nn.Module, inputs: Any, forward: Callable[[Any, Any], Tensor], policy: object) -> None:
    report = lowtide.inspect(model, inputs, policy, forward=forward)
    blocks = [name for kind in report.kinds for name in kind.blocks]
    by_block, rest = held_for_real(model, lambda: forward(model, inputs), policy, blocks)
    assert [report.block_bytes(name) for name in blocks] == by_block
    assert report.rest_bytes == rest
    assert report.total_bytes == sum(by_block) + rest
    assert lowtide.InspectReport.from_json(report.to_json()) == report


def zoo_inputs(name: str, model: nn.Module) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    if ARCHITECTURES[name].feed != "tokens":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(3, 90, (2, 16), generator=generator)
    takes = signatures.signature(type(model).forward).parameters
    return {"input_ids": tokens, "labels": tokens, **({"use_cache": False} if "use_cache" in takes else {})}


SLICE = {
    ("decoder", "selective"), ("decoder", "selective, replay"), ("decoder", "rules that recompute, executor recompute"),
    ("llama", "full"), ("gpt2", "rules that save"), ("qwen3", "rules that recompute"),
}  # fmt: skip
MODELS = (*families.FAMILIES, "t5", "bert", "vit", "mamba", "qwen3_moe")


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        pytest.param(m, p, id=f"{m}-{p}", marks=() if (m, p) in SLICE else pytest.mark.full)
        for m in MODELS
        for p in POLICIES
    ],
)
def test_totals_are_the_bytes_that_are_really_held(model: str, policy: str) -> None:
    if model in families.FAMILIES:
        tokens = models.tokens(models.Spec())
        check(families.build(model), tokens, families.logits_of, POLICIES[policy])
        return
    built = ARCHITECTURES[model].build()
    # Grouped products have a form for fake tensors in bfloat16 only.
    built = built.bfloat16() if model == "qwen3_moe" else built
    check(built, zoo_inputs(model, built), lambda m, inputs: m(**inputs).loss, POLICIES[policy])


def test_rows_say_what_happens_and_which_rule_decided() -> None:
    policy = POLICIES["selective"]
    report = lowtide.inspect(models.build(SPEC), models.tokens(SPEC), policy)
    assert report.rules == ("save: op sdpa", "save 1/2: op matmul")
    assert [kind.blocks for kind in report.kinds] == [("layers.0", "layers.1", "layers.2")]
    (kind,) = report.kinds
    assert [(r.executor, r.reason) for r in kind.regions] == [("recompute", "by default")]
    products = {row.module: row for row in kind.rows if row.op == "aten.mm.default"}
    saved = {name: (r.decision, r.rule, r.why) for name, r in products.items()}
    assert saved == {
        "attention.q": ("saved", 1, "save 1/2: op matmul, call 0"),
        "attention.v": ("saved", 1, "save 1/2: op matmul, call 2"),
        "feed.gate": ("saved", 1, "save 1/2: op matmul, call 4"),
        "feed.up": ("recomputed", 1, "save 1/2: op matmul, call 5"),
    }
    rows = SPEC.batch * SPEC.length
    up = products["feed.up"]
    assert (up.shape, up.dtype, up.nbytes) == ((rows, SPEC.hidden), "float32", 4 * rows * SPEC.hidden)
    assert up.recompute_flops == 2 * rows * SPEC.d * SPEC.hidden
    assert up.recompute_ms is not None
    assert up.recompute_ms > 0
    attention = [r for r in kind.rows if "scaled_dot_product" in r.op]
    assert [(r.decision, r.rule, r.nbytes) for r in attention] == [
        ("saved", 0, 4 * rows * SPEC.d),
        ("saved", 0, 4 * rows * SPEC.heads),
    ]
    inputs = [r for r in kind.rows if r.decision == "input"]
    assert [(r.op, r.module, r.nbytes, r.why) for r in inputs] == [("", "0", 4 * rows * SPEC.d, "executor keeps it")]
    # The last product of the block is saved by the rule and needed by nobody.
    assert [(n.op, n.module, n.held) for n in kind.never_needed] == [("aten.mm.default", "feed.down", False)]
    assert kind.input_bytes == 4 * rows * SPEC.d


def test_recompute_flops_are_those_of_what_runs_again() -> None:
    report = lowtide.inspect(models.build(SPEC), models.tokens(SPEC), {"kind": "full"})
    rows = SPEC.batch * SPEC.length
    products = 2 * rows * SPEC.d * (2 * SPEC.d + 2 * 16 + 2 * SPEC.hidden)
    attention = 4 * SPEC.batch * SPEC.heads * SPEC.length**2 * (SPEC.d // SPEC.heads)
    # Above the products and attention come norms and activations, element by element; down's product does not run.
    assert 0 < report.kinds[0].recompute_flops - products - attention < 0.05 * products
    assert report.recompute_flops == 3 * report.kinds[0].recompute_flops
    nothing = lowtide.inspect(models.build(SPEC), models.tokens(SPEC), {"kind": "none"})
    assert (nothing.recompute_flops, nothing.recompute_ms, nothing.checkpointed) == (0, 0.0, 0)
    assert {row.why for kind in nothing.kinds for row in kind.rows} == {"no region"}


def test_blocks_of_another_recipe_are_another_kind() -> None:
    rules = [
        {"layers": "layers.2", "action": "none"},
        {"layers": "layers.1", "op": "sdpa", "action": "save"},
    ]
    policy = {"kind": "rules", "default": "recompute", "rules": rules}
    report = lowtide.inspect(models.build(SPEC), models.tokens(SPEC), policy)
    assert [(kind.blocks, len(kind.regions)) for kind in report.kinds] == [
        (("layers.0",), 1),
        (("layers.1",), 1),
        (("layers.2",), 0),
    ]
    assert report.checkpointed == 2


class _Named(nn.Module):
    """Gives a name, routes by an integer result, and reads a table that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        hidden = lowtide.checkpoint_name(self.up(x), "ffn_in")
        order = hidden.detach().topk(4, dim=-1).indices
        gathered = torch.sin(hidden).gather(-1, order).sum(-1, keepdim=True)
        return x + self.down(torch.sin(hidden) * gathered) * table


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Named() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        table = torch.ones_like(x) * 2
        for layer in self.layers:
            x = layer(x, table)
        return x.sum()


def _call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@pytest.mark.parametrize("executor", ["recompute", "replay"])
def test_names_routing_and_what_blocks_share(executor: str) -> None:
    rules = [{"name": "ffn_in", "action": "save"}]
    policy = {"kind": "rules", "default": "recompute", "executor": executor, "rules": rules}
    x = torch.randn(4, 8)
    check(_Stack(), x, _call, policy)
    report = lowtide.inspect(_Stack(), x, policy)
    rows = report.kinds[0].rows
    assert [(r.op, r.nbytes) for r in rows if r.rule == 0] == [("aten.addmm.default", 4 * 4 * 16)]
    routing = [(r.op, r.dtype, r.decision) for r in rows if r.why == "routing"]
    assert ("aten.topk.default", "int64", "saved") in routing
    shared = [r for r in rows if r.module == "1"]
    assert [(r.decision, r.counted) for r in shared] == [("input", False)]
    assert 4 * 4 * 8 in [r.nbytes for r in report.rest]


def test_offloaded_values_do_not_count_and_those_that_stay_say_why() -> None:
    spec = models.Spec(d=128, hidden=192, length=128, layers=2)
    rules = [{"op": "matmul", "action": "offload"}, {"op": "aten.rsqrt", "action": "offload"}]
    policy = {"kind": "rules", "default": "recompute", "rules": rules}
    check(models.build(spec), models.tokens(spec), _call, policy)
    first, last = lowtide.inspect(models.build(spec), models.tokens(spec), policy).kinds
    products = [r for r in first.rows if r.op == "aten.mm.default"]
    assert [(r.decision, r.counted) for r in products] == [("offloaded", False)] * 6
    small = next(r for r in first.rows if r.op == "aten.rsqrt.default")
    assert (small.decision, small.why.partition("; ")[2]) == ("saved", "stays here, since it is smaller than 64 KiB")
    assert {r.why.partition("; ")[2] for r in last.rows if r.op == "aten.mm.default"} == {
        "stays here, since backward of the last region follows at once"
    }
    assert last.saved_bytes - first.saved_bytes == sum(r.nbytes for r in products)


def test_what_cannot_be_inspected_is_refused() -> None:
    model, tokens = models.build(SPEC), models.tokens(SPEC)
    with pytest.raises(NothingMatchedError, match=r"'aten.addmm' matched no operator.*aten.mm"):
        lowtide.inspect(model, tokens, {"kind": "selective_op", "save": ["aten.addmm"]})
    rules = [{"name": "x", "action": "save"}]
    with pytest.raises(NothingMatchedError, match="no value was given the name 'x'"):
        lowtide.inspect(model, tokens, {"kind": "rules", "default": "recompute", "rules": rules})
    applied = lowtide.apply(model, lowtide.Full())
    with pytest.raises(RefusedError, match="has a policy applied"):
        lowtide.inspect(model, tokens, {"kind": "full"})
    applied.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())
    with pytest.raises(RefusedError, match="the compiler chooses"):
        lowtide.inspect(model, tokens, {"kind": "memory_budget", "fraction": 0.5})


def test_the_model_is_left_alone_and_may_be_of_any_size() -> None:
    with torch.device("meta"):
        model = models.Decoder(
            models.Spec(d=4096, hidden=14336, heads=32, kv_heads=8, layers=2, vocab=128, length=4096)
        )
    before = torch.get_rng_state()
    tokens = torch.zeros(1, 4096, dtype=torch.int64, device="meta")
    report = lowtide.inspect(model, tokens, {"kind": "full"}, device="H100")
    assert report.kinds[0].saved_bytes == 4 * 4096 * 4096
    assert report.device == "H100"
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_page_holds_every_row_and_escapes_all_text() -> None:
    report = lowtide.inspect(models.build(SPEC), models.tokens(SPEC), POLICIES["selective"])
    bad = "<script>alert(1)</script>"
    page = write_inspect_page(report.model_copy(update={"model": bad, "assumptions": (bad,), "rules": (bad, "b")}))
    assert bad not in page
    assert page.count("&lt;script&gt;alert(1)") == 4
    rows = sum(len(kind.rows) for kind in report.kinds) + len(report.rest)
    assert len(re.findall(r'<tr class="(?:saved|recomputed|input|offloaded)">', page)) == rows
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert not re.search(r"(?:src|href)=|https?://|url\(", page)
    assert page.count("<script>") == 1


def test_the_command_prints_a_table_a_document_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(
        tmp_path,
        """\
        model: {kind: decoder}
        data: {kind: random}
        policy: {kind: selective_op, save: [sdpa, {op: aten.mm, keep: 1/2}]}
        """,
    )
    page = tmp_path / "page.html"
    assert run(["inspect", str(config), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "rule 1: save 1/2: op aten.mm" in out
    assert "aten.mm.default" in out
    assert page.read_text().startswith("<!doctype html>")
    assert run(["inspect", str(config), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    report = lowtide.InspectReport.from_json(json.dumps(document))
    assert report.policy == "selective_op"
    assert report.checkpointed == report.blocks > 0


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(ROOT / "docs/howto/inspect.md", "python")
    exec(compile(code, "inspect.md", "exec"), {})  # noqa: S102 - our own page
    lines = capsys.readouterr().out.splitlines()
    assert int(lines[-1]) > 0
    assert any(line.startswith("aten.addmm.default") and "saved save: op aten.addmm" in line for line in lines)


def _shown(capsys: pytest.CaptureFixture[str], config: Path, *overrides: str) -> str:
    assert run(["config", "show", str(config), *overrides]) == 0
    return capsys.readouterr().out


def test_show_writes_a_policy_as_rules_on_the_blocks_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(
        tmp_path,
        """\
        model: {kind: decoder, layers: 4}
        data: {kind: random}
        policy: {kind: every_nth_layer, n: 2, executor: replay}
        """,
    )
    text = _shown(capsys, config)
    head, _, comment = text.partition("# policy every_nth_layer as rules:\n")
    rules = yaml.safe_load("\n".join(line.removeprefix("# ") for line in comment.splitlines()))["policy"]
    assert yaml.safe_load(head) == yaml.safe_load(text)
    found = [Block(f"layers.{i}", "layers", i) for i in range(4)]
    short = resolve(lowtide.EveryNthLayer(n=2, executor="replay"), found)
    assert (rules["kind"], rules["executor"]) == ("rules", "replay")
    assert [r.fqn for r in resolve(parse_policy(rules), found).regions] == [r.fqn for r in short.regions]
    assert "as rules" not in _shown(capsys, config, "--set", "policy={kind: none}")
    unknown = _shown(capsys, config, "--set", "policy={kind: full, layers: blocks.*}")
    assert (
        "# policy full as rules: not known, since the model's blocks are not: layers: 'blocks.*' matches no" in unknown
    )
