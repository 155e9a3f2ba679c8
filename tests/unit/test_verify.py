# SPDX-License-Identifier: Apache-2.0
"""hifc.verify and hifc-admin verify: equal bits pass, a broken cache is caught, nothing is left."""

from __future__ import annotations

import html
import importlib.util
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import kv_models as kv
from admin_shell import Shell, code_of
from byte_model import make_model
from hifc import HiFC, InvalidRequest, verify
from hifc.integrations.transformers.cache import HiFCCache
from hifc.verify import Bounds, attention, lockstep
from hifc.verify.lockstep import Plan
from hifc.verify.result import Stage, Verification
from hifc_admin.result import Exit

TEXT = "The owner of a device is one process, and it listens on a socket. " * 12
SMALL = ("--tokens", "700", "--score", "24", "--generate", "4")
PLAN = Plan(scored=40, generated=8)
OPTIONS: dict[str, Any] = {"resident": 0.65, "block_tokens": 32}


CONFIG = {
    "device": "ram://verify-test?size=256MiB",
    "format": "always",
    "pool_size": "32MiB",
    "memory_budget": "2MiB",
    "swap_buffer_size": 0,
    "owner_socket": False,
}


@pytest.fixture
def engine() -> Iterator[HiFC]:
    with HiFC(CONFIG) as opened:
        yield opened


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "model"
    make_model(folder)
    (folder.parent / "text").write_text(TEXT)
    return folder


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def turn_one_head(monkeypatch: pytest.MonkeyPatch, layer: int, head: int) -> None:
    """One key head of one layer comes back at the wrong positions: rotated once more."""
    update = HiFCCache.update

    def turned(self: Any, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        found, others = update(self, keys, values, layer_idx, *args, **kwargs)
        if layer_idx != layer:
            return found, others
        found = found.clone()
        half = found.shape[-1] // 2
        one = found[:, head]
        found[:, head] = torch.cat([-one[..., half:], one[..., :half]], -1)
        return found, others

    monkeypatch.setattr(HiFCCache, "update", turned)


# ---- in Python


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunk", [None, 50])
def test_exact_mode_has_no_difference(engine: HiFC, attention: str, chunk: int | None) -> None:
    network = kv.model(attention=attention)
    plan = Plan(scored=40, generated=8, prefill_chunk=chunk)
    ticks: list[int] = []
    found = verify.run(network, kv.tokens(200), engine, plan=plan, tick=ticks.append, **OPTIONS)
    assert found.verdict == "PASSED", found.failures()
    assert [stage.name for stage in found.stages] == [
        "decode",
        "generate",
        "prefix",
        "prefix_and_computed",
    ]
    decode, generate, prefix, computed = found.stages
    assert (decode.steps, generate.steps, prefix.steps, computed.steps) == (40, 8, 32, 32)
    assert decode.largest == generate.largest == prefix.largest == 0
    assert decode.same_bits
    assert prefix.same_bits
    assert 0 <= computed.largest <= 1e-3
    assert decode.ratio() == (1.0, 1.0, 1.0)
    assert found.settings["loaded_tokens"] == 159
    assert found.resident_bytes < found.total_bytes
    assert ticks[-1] == plan.steps(200)
    assert not list(engine.namespace.list()), "something stayed on the device"
    assert found.maps is not None
    assert found.maps.distance.shape == (8, 4)
    assert found.maps.distance.max() == 0
    assert found.maps.hifc.sum(axis=-1) == pytest.approx(1, abs=1e-5)


def test_sixteen_bit(engine: HiFC) -> None:
    network = kv.model(dtype=torch.bfloat16)
    found = verify.run(network, kv.tokens(300), engine, plan=PLAN, resident=0.7)
    assert found.verdict == "PASSED", found.failures()
    assert found.stages[3].checks() == [], "another partition of 16-bit arithmetic has no bound"


@pytest.mark.parametrize(("layer", "head"), [(0, 1), (7, 0)])
def test_a_head_turned_wrongly_is_caught(
    engine: HiFC, monkeypatch: pytest.MonkeyPatch, layer: int, head: int
) -> None:
    network, ids = kv.model(), kv.tokens(200)
    turn_one_head(monkeypatch, layer, head)
    found = verify.run(network, ids, engine, plan=PLAN, **OPTIONS)
    assert found.verdict == "FAILED"
    assert any("bitwise" in line for line in found.failures())
    assert found.maps is not None
    # Two query heads share a key head; layers before the broken one are as they were.
    assert found.maps.distance[layer].argmax() // 2 == head
    assert found.maps.distance[:layer].max(initial=0) == 0
    assert not list(engine.namespace.list())


def test_one_wrong_bit_is_caught(engine: HiFC, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of one value in the middle of the text; tokens stay the same."""
    update = HiFCCache.update

    def flipped(self: Any, keys: Any, values: Any, layer_idx: int, *rest: Any, **kw: Any) -> Any:
        found, others = update(self, keys, values, layer_idx, *rest, **kw)
        if layer_idx == 3 and others.shape[2] > 180:
            others = others.clone()
            others[0, 0, 170].view(torch.int32)[0] ^= 1 << 12
        return found, others

    monkeypatch.setattr(HiFCCache, "update", flipped)
    found = verify.run(kv.model(), kv.tokens(200), engine, plan=PLAN, **OPTIONS)
    decode = found.stages[0]
    assert found.verdict == "FAILED"
    assert 0 < decode.largest < 1e-3
    assert decode.agreement == 1
    loose = Stage("decode", "decode", Bounds(1e-3))
    loose.difference, loose.same_token = decode.difference, decode.same_token
    assert all(check.passed for check in loose.checks())


SPARSE = CONFIG | {
    "attention": "sparse",
    "resident_ratio": 0.53,  # what two rotating layers of eight take with their sketch
    "sparse_resident_max": 0.53,
    "sparse_missed_max": 1.0,
}


def test_sparse_mode() -> None:
    """Judged by perplexity, which a random model hardly tells; the maps show what it looked at."""
    network = kv.model(8)
    with HiFC(SPARSE) as engine:
        found = verify.run(network, kv.tokens(1200), engine, plan=Plan(40, 4))
    assert found.mode == "sparse"
    assert [stage.name for stage in found.stages] == ["decode", "generate"]
    assert not found.stages[0].same_bits
    assert found.verdict in ("PASSED", "NOT VERIFIED"), found.failures()
    assert found.quality["steps"] > 30
    assert network.config._attn_implementation == "sdpa"
    maps = found.maps
    assert maps is not None
    assert maps.hifc.sum(axis=-1) == pytest.approx(1, abs=1e-5)
    assert ((maps.hifc == 0) & (maps.reference > 0)).any(), "it attended to everything"


def test_sparse_attention_is_exact_where_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In layer 0, token by token: the weights of exact attention, scaled alike."""
    monkeypatch.setattr(attention, "COLUMNS_MAX", 4096)
    seen: list[tuple[Any, Any]] = []
    add = lockstep._MapBuilder.add

    def spy(self: Any, position: int, reference: Any, hifc: Any) -> None:
        seen.append((reference[0], hifc[0]))
        add(self, position, reference, hifc)

    monkeypatch.setattr(lockstep._MapBuilder, "add", spy)
    with HiFC(SPARSE) as engine:
        verify.run(kv.model(8), kv.tokens(1200), engine, plan=Plan(20, 0))
    assert len(seen) == 20
    for reference, sparse in seen:
        for exact, chosen in zip(reference, sparse, strict=True):
            there = chosen > 0
            assert 0 < there.sum() < 400
            assert chosen[there] * exact[there].sum() == pytest.approx(exact[there], rel=1e-3)


def test_no_number_fails() -> None:
    stage = Stage("decode", "decode", Bounds(1e-3, 1.01, 0.5))
    stage.difference, stage.same_token = [0.0, math.nan], [True, True]
    stage.nll_reference, stage.nll_hifc = [1.0, 1.0], [1.0, math.nan]
    assert [check.outcome for check in stage.checks()] == ["FAILED", "FAILED", "passed"]
    assert stage.checks()[0].data()["found"] is None


def test_perplexity_and_its_interval() -> None:
    stage = Stage("decode", "decode", Bounds(None, 1.01, None))
    stage.nll_reference = [1.0, 2.0, 3.0, math.nan]
    stage.nll_hifc = [1.1, 2.0, 3.2, math.nan]
    reference, hifc = stage.perplexities()
    ratio, low, high = stage.ratio()
    assert reference == pytest.approx(math.exp(2.0))
    assert ratio == pytest.approx(hifc / reference) == pytest.approx(math.exp(0.1))
    assert low == pytest.approx(math.exp(0.1 - 1.96 * 0.1 / math.sqrt(3)))
    assert high > ratio > low
    assert stage.checks()[0].outcome == "undecided", "three tokens tell little"
    stage.nll_reference, stage.nll_hifc = [1.0] * 900, [1.1, 1.12] * 450
    assert stage.checks()[0].outcome == "FAILED"
    stage.nll_hifc = [1.1, 0.9] * 450
    assert stage.checks()[0].outcome == "passed"


def test_undecided_is_not_a_pass() -> None:
    stage = Stage("decode", "decode", Bounds(None, 1.01, None))
    stage.nll_reference, stage.nll_hifc = [1.0, 2.0, 3.0], [1.1, 2.0, 3.2]
    found = Verification("sparse", "m", "ram://", {}, [stage], read_bytes=1)
    assert (found.verdict, found.passed) == ("NOT VERIFIED", False)
    assert found.failures() == []
    assert "too few" in found.undecided()[0]


def test_nothing_read_is_not_a_pass(engine: HiFC) -> None:
    found = verify.run(
        kv.model(), kv.tokens(60), engine, plan=Plan(20, 2, prefix=False), resident=1.0
    )
    assert all(check.passed for check in found.checks())
    assert found.verdict == "NOT VERIFIED"
    assert not found.passed


def test_bad_requests(engine: HiFC) -> None:
    network = kv.model()
    with pytest.raises(InvalidRequest, match="longer text"):
        verify.run(network, kv.tokens(20), engine, plan=Plan(scored=19))
    with pytest.raises(InvalidRequest, match="shape"):
        verify.run(network, kv.tokens(60, rows=2), engine)
    with pytest.raises(InvalidRequest, match="prefill_chunk"):
        verify.run(network, kv.tokens(60), engine, plan=Plan(4, prefill_chunk=0))
    for scored in (0, None, "x", 1.5):
        with pytest.raises(InvalidRequest, match="scored"):
            verify.run(network, kv.tokens(60), engine, plan=Plan(scored))  # type: ignore[arg-type]
    for ids in (None, "text", [1.5], {}):
        with pytest.raises(InvalidRequest, match="token_ids"):
            verify.run(network, ids, engine)
    with pytest.raises(InvalidRequest, match="generate"):
        verify.run(None, kv.tokens(60), engine)
    with pytest.raises(InvalidRequest, match="cache"):
        verify.run(network, kv.tokens(60), "ram://")  # type: ignore[arg-type]


def test_attention_functions_are_as_before(engine: HiFC) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    verify.run(kv.model(), kv.tokens(200), engine, plan=PLAN, **OPTIONS)
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == before


def test_the_report_is_one_file(engine: HiFC, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    found = verify.run(kv.model(), kv.tokens(200), engine, plan=PLAN, **OPTIONS)
    found.settings["note"] = "<script>"
    verify.write(found, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "PASSED" in text
    assert text.count("data:image/png;base64,") == 3
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)
    assert "<script>" not in text
    words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
    assert found.sentence in words
    assert "The logits of all 40 scored tokens are equal to the bit" in found.sentence
    assert "reading the text: logits are bitwise equal 40 of 40 tokens all" in words
    assert "reading the text: both choose the same token 40 of 40 tokens all" in words
    assert "- (- to -)" not in words
    for name in ("date", "hifc", "torch", "transformers", "CPU", "speed, one token at a time"):
        assert f" {name} " in words
    assert torch.__version__ in words


def test_differences_of_nothing_stand_at_zero() -> None:
    """And of lines that lie on each other, each is narrower than the one below it."""
    plots = pytest.importorskip("hifc.verify.plots")
    stages = [Stage(name, name, Bounds(), [0.0, 0.0], nll_reference=[1.0, 2.0]) for name in "abcd"]
    for stage in stages:
        stage.nll_hifc = stage.nll_reference
    figure = plots._steps(stages)
    figure.canvas.draw()
    left, right = figure.axes
    low, high = left.get_ylim()
    assert low < 0 < high
    assert left.get_yticks()[0] == 0
    assert "means" not in left.get_ylabel()
    for axes in (left, right):
        widths = [line.get_linewidth() for line in axes.get_lines()]
        assert widths == sorted(set(widths), reverse=True)


def test_sentences() -> None:
    stage = Stage("decode", "reading", Bounds(), [0.0, 0.5], same_token=[True, False])
    stage.equal_bits = [True, False]
    found = Verification("exact", "m", "ram://", {}, [stage], read_bytes=1)
    assert found.sentence == (
        "What was promised was not kept: reading: logits are bitwise equal: 1 of 2 tokens, others "
        "by up to 0.5, wanted all."
    )
    stage.equal_bits, stage.difference, stage.same_token = [True] * 2, [0.0] * 2, [True] * 2
    found.resident_bytes, found.total_bytes = 25, 100
    assert found.sentence == (
        "The logits of all 2 scored tokens are equal to the bit; 75 % of the KV was on the device."
    )
    assert found.data()["sentence"] == found.sentence
    found.read_bytes = 0
    assert found.sentence.startswith("This run says nothing about HiFC: ")


# ---- on the command line


def test_command(admin: Shell, checkpoint: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    uri = f"file://{tmp_path}/kv?size=256MiB"
    words = ("verify", str(checkpoint), "--text", str(checkpoint.parent / "text"), *SMALL)
    assert admin(*words, "--device", uri, "--report", str(report)) == 0
    assert admin.out.startswith("PASSED: ")
    assert admin.out.splitlines()[-1].startswith("The logits of all 24 scored tokens are equal")
    assert "PASSED" in report.read_text()
    assert html.unescape(report.read_text()).count(shlex.join(["hifc-admin", *words])) == 1
    # Again, on the namespace that is there by now.
    code, document = admin.json(*words, "--device", uri)
    assert code == 0
    assert document["data"]["verdict"] == "PASSED"
    assert document["data"]["read_bytes"] > 0
    assert {check["outcome"] for check in document["data"]["checks"]} == {"passed"}


def test_command_fails_on_a_broken_cache(
    admin: Shell, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn_one_head(monkeypatch, 5, 0)
    report = tmp_path / "report.html"
    words = ("verify", str(checkpoint), "--text", str(checkpoint.parent / "text"), *SMALL)
    assert admin(*words, "--report", str(report)) == Exit.FAILED
    assert admin.out.startswith("FAILED: ")
    assert "bitwise" in admin.err
    assert "FAILED" in report.read_text()
    code, document = admin.json(*words)
    assert code == Exit.FAILED
    assert {problem["code"] for problem in document["problems"]} == {"differs"}


def test_command_says_when_it_verified_nothing(
    admin: Shell, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verification, "is_meaningful", False)
    words = ("verify", str(checkpoint), "--text", str(checkpoint.parent / "text"), *SMALL)
    code, document = admin.json(*words)
    assert (code, code_of(document)) == (Exit.PARTLY, "not-verified")


def test_command_says_when_sparse_attention_gave_up(
    admin: Shell, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: Any, **options: Any) -> Verification:
        found = compared(*arguments, **options)
        found.quality["exact"] = "too much was missed"
        return found

    compared = lockstep.run
    monkeypatch.setattr(lockstep, "run", run)
    words = ("verify", str(checkpoint), "--text", str(checkpoint.parent / "text"), *SMALL)
    code, document = admin.json(*words)
    assert (code, code_of(document)) == (Exit.PARTLY, "became-exact")


def test_command_with_all_layers_in_memory(admin: Shell, checkpoint: Path) -> None:
    """Then nothing streams, but the prefix is loaded from the device."""
    words = ("verify", str(checkpoint), "--text", str(checkpoint.parent / "text"), *SMALL)
    code, document = admin.json(*words, "--resident", "1.0", "--generate", "0")
    assert code == 0, document["problems"]
    assert document["data"]["read_bytes"] > 0


def test_wrong_usage(admin: Shell, checkpoint: Path, tmp_path: Path) -> None:
    text = str(checkpoint.parent / "text")
    for words in (
        (str(checkpoint), "--text", str(tmp_path / "none")),
        (str(checkpoint), "--text", text, "--report", "report.doc"),
        (str(checkpoint), "--text", text, "--report", str(tmp_path / "no/report.html")),
        (str(checkpoint), "--text", text, "--tolerance", "-1"),
        (str(checkpoint), "--text", text, "--tokens", "3"),
        (str(checkpoint), "--text", text, "--device", "nothing"),
        (str(checkpoint), "--text", text, "--tokens", "9999", "--generate", "9000"),
        (str(checkpoint), "--text", text, *SMALL, "--resident", "0.01"),
    ):
        assert admin.json("verify", *words)[0] == Exit.USAGE, words
    code, document = admin.json("verify", str(tmp_path), "--text", text)
    assert (code, code_of(document)) == (Exit.FAILED, "no-model")


def test_what_is_there_is_never_formatted(admin: Shell, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"data" * (16 << 18))
    before = path.read_bytes()
    words = ("verify", str(checkpoint), "--text", str(checkpoint.parent / "text"), *SMALL)
    code, document = admin.json(*words, "--device", f"file://{path}")
    assert (code, code_of(document)) == (Exit.FAILED, "no-namespace")
    assert path.read_bytes() == before


@pytest.mark.parametrize("missing", ["torch", "jinja2"])
def test_a_missing_package_names_the_extra(
    admin: Shell, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    words = ("verify", str(checkpoint), "--text", str(checkpoint.parent / "text"))
    code, document = admin.json(*words, "--report", "report.html")
    assert (code, code_of(document)) == (Exit.PREREQUISITE, "no-package")
    assert "hifc[verify]" in document["problems"][0]["fix"]


def test_other_verbs_import_no_torch() -> None:
    script = (
        "import sys, hifc_admin.main, hifc.verify; hifc_admin.main.make_parser(); "
        "print([n for n in ('torch', 'transformers', 'matplotlib', 'jinja2') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"
