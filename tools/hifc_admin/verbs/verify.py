# SPDX-License-Identifier: Apache-2.0
"""The verb verify: a model and a text of the user's, with and without HiFC, and a report of it.

torch and transformers are imported when the verb runs, not before: hifc-admin works without them.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hifc.errors import InvalidRequest
from hifc.stream.plan import RESIDENT_RATIO
from hifc_admin import progress, target, text
from hifc_admin.parsing import Verbs, add_verb, whole_number
from hifc_admin.result import Exit, Failure, Problem, Result

if TYPE_CHECKING:
    from hifc.verify import Verification
    from hifc.verify.lockstep import Plan

TOKENS = 2048
SCORED_MAX = 256
DTYPES = ("auto", "float32", "float16", "bfloat16")
# A device in memory holds what is swapped and the stored prefix, each with room to spare.
RAM_SHARE = 4
RAM_SPARE_BYTES = 1 << 30
RAM_SEGMENT_BYTES = 64 << 20
POOL_SPARE_BYTES = 32 << 20


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "verify",
        verify,
        "compare a model with and without HiFC: logits, perplexity, attention maps",
        "hifc-admin verify ./model --text book.txt --device 'file:///var/tmp/kv.hifc?size=8GiB' "
        "--report report.html",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a checkpoint, or its name")
    parser.add_argument(
        "--text", metavar="FILE", type=Path, required=True, help="what the model reads"
    )
    parser.add_argument(
        "--device",
        metavar="URI",
        help="a namespace, or a file that is not there yet and is made with its size: "
        "'file:///var/tmp/kv.hifc?size=8GiB' (default: memory)",
    )
    parser.add_argument("--report", metavar="FILE", type=Path, help="the report, as .html")
    parser.add_argument("--mode", choices=("exact", "sparse"), default="exact", help="of the cache")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=whole_number(1),
        default=TOKENS,
        help="of the text, if it has as many (default: %(default)s)",
    )
    parser.add_argument(
        "--score",
        metavar="N",
        type=whole_number(1),
        help=f"the last tokens, compared one by one (default: a quarter, at most {SCORED_MAX})",
    )
    parser.add_argument(
        "--generate",
        metavar="N",
        type=whole_number(0),
        default=32,
        help="tokens that the model writes itself (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        metavar="N",
        type=whole_number(1),
        help="tokens a forward of the prompt (default: all)",
    )
    parser.add_argument(
        "--resident",
        metavar="SHARE",
        type=float,
        default=RESIDENT_RATIO,
        help="of the KV, that may stay in memory (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="largest difference of a logit that passes (default: 0 in exact mode, else any)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the model")


def verify(arguments: argparse.Namespace) -> Result:
    _check(arguments)
    model, ids = _load(arguments)
    found = _run(arguments, model, ids)
    found.settings["text"] = str(arguments.text)
    found.run["command"] = shlex.join(arguments.command)
    data = found.data()
    if arguments.report:
        from hifc.verify import report

        report.write(found, arguments.report)
        data["report"] = str(arguments.report)
    result = Result(data, _lines(found, arguments))
    if found.quality.get("exact"):
        result.exit = Exit.PARTLY  # what came after it says nothing about sparse attention
        detail = f"the cache became exact on its way: {found.quality['exact']}"
        fix = "a larger --resident"
        result.problems.append(Problem("became-exact", found.model, detail, fix=fix))
    if found.verdict == "FAILED":
        result.exit = Exit.FAILED
        see = f"see {arguments.report}" if arguments.report else "repeat with --report FILE"
        for failure in found.failures():
            result.problems.append(Problem("differs", found.model, failure, fix=see))
    elif found.undecided():
        result.exit = Exit.PARTLY
        for line in found.undecided():
            fix = "a longer text, more --tokens and --score"
            result.problems.append(Problem("undecided", found.model, line, fix=fix))
    elif not found.is_meaningful:
        result.exit = Exit.PARTLY
        detail = "no KV was read from the device: all of it fitted into memory"
        fix = "more --tokens, or a smaller --resident"
        result.problems.append(Problem("not-verified", found.model, detail, fix=fix))
    return result


# ---- before anything is loaded


def _check(arguments: argparse.Namespace) -> None:
    wanted = ["torch", "transformers"]
    if arguments.report:
        wanted += ["matplotlib", "jinja2"]
        if arguments.report.suffix != ".html":
            _usage(str(arguments.report), "the report's name must end with .html")
        if not arguments.report.resolve().parent.is_dir():
            _usage(str(arguments.report), "its folder is not there")
    if not arguments.text.is_file():
        _usage(str(arguments.text), "there is no such text file")
    if arguments.device is not None:
        target.parse(arguments.device)
    if arguments.tolerance is not None and not arguments.tolerance >= 0:
        _usage("--tolerance", f"{arguments.tolerance} is no difference: use 0 or more")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        detail = f"verify needs {', '.join(missing)}"
        problem = Problem("no-package", missing[0], detail, fix="pip install 'hifc[verify]'")
        raise Failure(Exit.PREREQUISITE, problem)


def _usage(subject: str, detail: str) -> None:
    raise Failure(Exit.USAGE, Problem("bad-argument", subject, detail))


# ---- model and text


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and ids [1, tokens] of the text."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    arguments.announce(f"loading {arguments.model}")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=arguments.dtype
        ).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        detail = f"it cannot be loaded: {str(error).splitlines()[0]}"
        raise Failure(Exit.FAILED, Problem("no-model", arguments.model, detail)) from error
    written = arguments.text.read_text(encoding="utf-8", errors="replace")
    ids = tokenizer(written, return_tensors="pt", verbose=False).input_ids[:, : arguments.tokens]
    room = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    needed = ids.shape[1] + arguments.generate
    if room is not None and needed > room:
        detail = f"{needed} tokens are read and written, the model has {room} positions"
        fix = f"--tokens {room - arguments.generate}"
        raise Failure(Exit.USAGE, Problem("too-long", arguments.model, detail, fix=fix))
    return model, ids


def _plan(arguments: argparse.Namespace, tokens: int) -> Plan:
    from hifc.verify.lockstep import Plan

    scored = arguments.score
    if scored is None:
        scored = max(1, min(SCORED_MAX, tokens // 4))
    plan = Plan(scored, arguments.generate, arguments.chunk, prefix=arguments.mode == "exact")
    try:
        plan.check(tokens)
    except InvalidRequest as error:
        _usage(str(arguments.text), str(error))
    return plan


# ---- the comparison


def _run(arguments: argparse.Namespace, model: Any, ids: Any) -> Verification:
    import hifc
    from hifc.integrations.transformers.core import kv_shape
    from hifc.verify import Bounds, lockstep

    plan = _plan(arguments, ids.shape[1])
    shape = kv_shape(model.config.get_text_config(decoder=True), 1)
    kv_bytes = (ids.shape[1] + plan.generated) * shape.token_bytes
    bounds = Bounds.of_mode(arguments.mode)
    if arguments.tolerance is not None:
        bounds = Bounds(arguments.tolerance, bounds.ratio, bounds.agreement)
    config = {
        **_device(arguments.device, kv_bytes),
        "pool_size": kv_bytes + kv_bytes // 4 + POOL_SPARE_BYTES,
        "memory_budget": "2MiB",
        "swap_buffer_size": 0,
        "attention": arguments.mode,
        "resident_ratio": arguments.resident,
        "sparse_resident_max": max(arguments.resident, hifc.Config.sparse_resident_max),
    }
    # Errors are about the device from here on.
    arguments.uri = config["device"]
    total = plan.steps(ids.shape[1])
    with (
        hifc.HiFC(hifc.Config.from_mapping(config)) as engine,
        progress.of(arguments, "comparing", total, is_bytes=False) as shown,
    ):
        return lockstep.run(
            model,
            ids,
            engine,
            plan=plan,
            bounds=bounds,
            tick=shown.at,
        )


def _device(uri: str | None, kv_bytes: int) -> dict[str, Any]:
    """Memory, and a file that is not there yet, are formatted; what is there never is."""
    if uri is None:
        size = RAM_SHARE * kv_bytes + RAM_SPARE_BYTES
        # An image lives as long as the process, and at one size.
        return {
            "device": f"ram://verify-{size}?size={size}",
            "format": "always",
            "segment_size": RAM_SEGMENT_BYTES,
        }
    path = target.parse(uri).path
    missing = path is not None and not path.exists()
    return {"device": uri, "format": "if_missing" if missing else "never"}


# ---- for people


def _lines(found: Verification, arguments: argparse.Namespace) -> Iterator[str]:
    color = text.Color.GOOD if found.verdict == "PASSED" else text.Color.WARNING
    color = text.Color.BAD if found.verdict == "FAILED" else color
    verdict = text.paint(found.verdict, color)
    yield f"{verdict}: {found.model}, {found.mode} mode, on {found.device}"
    rows = []
    for stage in found.stages:
        reference, hifc = stage.perplexities()
        rows.append(
            (
                stage.title,
                stage.steps,
                f"{stage.largest:.3g}",
                f"{sum(stage.equal_bits)} of {stage.steps}",
                f"{sum(stage.same_token)} of {stage.steps}",
                *(("-", "-") if reference != reference else (f"{reference:.4f}", f"{hifc:.4f}")),
            )
        )
    head = ("STAGE", "TOKENS", "DIFFERENCE", "SAME BITS", "SAME TOKEN", "PERPLEXITY", "HIFC")
    yield from text.table(head, rows)
    yield from text.pairs(
        (
            ("cache", found.settings["cache"]),
            ("KV read from the device", text.size(found.read_bytes)),
            ("report", arguments.report or "none; --report FILE makes one"),
        )
    )
    yield text.paint(found.sentence, color)
