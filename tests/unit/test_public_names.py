"""What a program sees of the package: names, help, types, optional packages."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import typing
from pathlib import Path

import pytest

import hifc
from hifc import config
from hifc.config import Config, ConfigDict
from hifc.errors import HiFCError, MissingPackage
from hifc.util import packages

REPOSITORY = Path(__file__).parents[2]


def python(code: str) -> str:
    """Runs code in a process of its own; its output."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# ---- names


def test_dir_shows_what_a_user_needs_and_nothing_of_the_modules_own() -> None:
    shown = {name for name in python("import hifc; print(*dir(hifc))").split() if name[0] != "_"}
    assert {"HiFC", "Namespace", "Config", "KeyScheme", "HiFCError", "NoSpace", "verify"} <= shown
    own = {"Any", "TYPE_CHECKING", "annotations", "importlib", "packages", "config"}
    assert not shown & own
    assert not shown & {"REQUEST", "EventKind", "BlockTable", "make_requests"}
    assert "__version__" in dir(hifc)


def test_names_for_integrators_can_be_imported_and_end_the_list() -> None:
    integrators = ["Op", "REQUEST", "make_requests", "EventKind", "BlockKeys", "BlockTable"]
    integrators += ["HotColdClassifier", "HiFCPrefetcher"]
    assert hifc.__all__[-len(integrators) :] == integrators
    assert hifc.__all__[:2] == ["HiFC", "Namespace"]
    for name in hifc.__all__:
        assert getattr(hifc, name) is not None
    assert len(set(hifc.__all__)) == len(hifc.__all__)


def test_every_error_is_public() -> None:
    from hifc import errors

    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, HiFCError)
    }
    assert defined <= set(hifc.__all__)


def test_the_version_is_that_of_the_distribution() -> None:
    assert hifc.__version__ == importlib.metadata.version("hifc")


def test_help_begins_with_what_the_package_is_and_needs_no_torch() -> None:
    text = python(
        """
        import sys
        sys.modules["torch"] = None
        import hifc, pydoc
        print(pydoc.render_doc(hifc, renderer=pydoc.plaintext))
        """
    )
    head = text[:1600]
    assert "engine.cache(model.config" in head
    assert "Namespace.format(" in head
    assert "enum hifc_" not in re.sub(r"\(C: enum hifc_\w+\)", "", text)


def test_the_cache_can_be_named_and_is_loaded_when_it_is() -> None:
    out = python(
        """
        import sys, hifc
        assert "torch" not in sys.modules
        from hifc import HiFCCache
        from hifc.integrations.transformers.cache import HiFCCache as same
        print(HiFCCache is same)
        """
    )
    assert out == "True\n"


def test_public_classes_say_what_they_are() -> None:
    for name in hifc.__all__:
        value = getattr(hifc, name)
        if inspect.isclass(value) and value.__module__.startswith("hifc"):
            first = (value.__doc__ or "").split("\n")[0]
            assert len(first.split()) >= 4, (name, first)
            assert not first.startswith(("enum ", "Not thread-safe")), (name, first)


def test_the_fields_of_a_block_are_documented() -> None:
    text = hifc.KVBlock.__doc__ or ""
    for field in dataclasses.fields(hifc.KVBlock):
        assert re.search(rf"\b{field.name}\b[^.]*:", text), field.name


# ---- optional packages


@pytest.mark.parametrize(
    ("missing", "call", "extra"),
    [
        ("torch", "engine.cache(object(), max_tokens=8)", "transformers"),
        ("transformers", "engine.cache(object(), max_tokens=8)", "transformers"),
        ("torch", "hifc.HiFCCache", "transformers"),
        ("torch", "hifc.verify.run", "verify"),
        ("transformers", "from hifc.verify import run", "verify"),
        ("matplotlib", "hifc.verify.write", "verify"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    missing: str, call: str, extra: str
) -> None:
    out = python(
        f"""
        import sys
        sys.modules[{missing!r}] = None  # as if it were not installed
        import hifc
        with hifc.HiFC({{"device": "ram://missing?size=64MiB", "format": "if_missing",
                         "memory_budget": "1MiB", "swap_buffer_size": 0}}) as engine:
            try:
                {call}
            except hifc.MissingPackage as error:
                assert isinstance(error, ImportError) and isinstance(error, hifc.HiFCError)
                print(error.package, error.extra, error.fix, error, sep="|")
        """
    )
    package, found_extra, fix, message = out.strip().split("|")
    assert (package, found_extra) == (missing, extra)
    assert fix == f"pip install 'hifc[{extra}]'"
    assert f"needs {missing}, which is not installed: `{fix}`" in message
    assert ("CPU build" in message) == (missing == "torch")


def test_an_old_release_is_refused_with_the_least_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers  # noqa: F401  (which asks for versions itself while it is imported)

    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "5.13.1")
    with pytest.raises(MissingPackage, match=r"needs transformers 5\.14 or newer, 5\.13\.1 is"):
        packages.need("a cache", "transformers", "transformers")
    for enough in ("5.14.0", "5.14.0rc1", "5.20", "6.0.0.dev0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _name, found=enough: found)
        packages.need("a cache", "transformers", "transformers")


def test_a_package_that_is_broken_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "half_there.py").write_text("import surely_not_installed\n")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from hifc.util.packages import need
        try:
            need("a test", "test", "half_there")
        except ModuleNotFoundError as error:
            print(error.name)
        """
    assert python(code) == "surely_not_installed\n"


def test_the_least_releases_are_those_of_the_metadata() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [line for lines in extras.values() for line in lines]
    for package, least in packages.LEAST.items():
        (line,) = [line for line in wanted if re.match(rf"{package}[<>=]", line)]
        assert f">={'.'.join(map(str, least))}" in line, line


# ---- types


def test_the_mapping_for_type_checkers_has_the_settings_of_the_configuration() -> None:
    hints = typing.get_type_hints(ConfigDict)
    fields = {field.metadata["key"] or field.name: field for field in dataclasses.fields(Config)}
    assert list(hints) == list(fields)
    for name, field in fields.items():
        kind, hint = field.metadata["kind"], hints[name]
        if typing.get_origin(hint) is typing.Literal:
            assert ", ".join(typing.get_args(hint)) == kind.allowed, name
        elif kind is config._SIZE:
            assert hint == int | str, name
        else:
            assert hint.__name__ == field.type, name
            assert (
                kind.allowed in ("true, false", "a text", "a URI or a path") or "to" in kind.allowed
            ), name


def test_the_options_for_type_checkers_are_those_of_the_cache() -> None:
    from hifc.integrations.transformers.cache import HiFCCache
    from hifc.integrations.transformers.options import CacheOptions

    parameters = inspect.signature(HiFCCache).parameters.values()
    options = {item.name for item in parameters if item.kind is item.KEYWORD_ONLY}
    assert set(typing.get_type_hints(CacheOptions)) == options | {"sparse"}


GOOD = """
import numpy as np
import hifc

def work(model_config: object, ids: object) -> int:
    print(hifc.__version__)
    settings: hifc.ConfigDict = {"device": "ram://x?size=64MiB", "pool_size": "8MiB", "lambda": 0.2}
    settings["policy"] = "lru"
    with hifc.HiFC(settings) as engine:
        engine.store(b"k" * 16, np.zeros(4, np.float32), cls="reuse")
        engine.store(b"k" * 16, np.zeros(4, np.float32), cls=hifc.BlockClass.SWAP)
        found = engine.load(b"k" * 16)
        assert found is not None
        cache: hifc.HiFCCache = engine.cache(
            model_config, max_tokens=100, resident=0.5, lora="a", load_or_recompute="load"
        )
        cache.load_prefix(ids)
    hifc.HiFC({"device": "ram://x?size=64MiB", "format": "if_missing"}).close()
    hifc.HiFC(hifc.Config.from_mapping({"device": "ram://x"})).close()
    with hifc.Namespace.open("ram://x") as namespace:
        answers = namespace.lookup([b"k" * 16])
        return int(answers.sum())
"""

# What is written behind the code of the error that has to be found there.
BAD = """
import hifc

engine = hifc.HiFC({"device": "ram://x", "formt": "never"})  # arg-type
hifc.HiFC({"device": "ram://x", "format": "allways"})  # arg-type
hifc.HiFC({"device": "ram://x", "prefetch_degree": "2"})  # arg-type
misspelt: hifc.ConfigDict = {"device": "ram://x", "formt": "never"}  # typeddict-unknown-key
unknown: hifc.ConfigDict = {"device": "ram://x", "format": "allways"}  # typeddict-item
engine.store(b"k" * 16, b"", cls="resue")  # arg-type
engine.cache(None, max_tokens=9, residnt=0.5)  # call-arg
engine.cache(None, max_tokens=9, load_or_recompute="lode")  # arg-type
engine.load(b"k" * 16).nothing()  # union-attr
hifc.Namespace.open("ram://x").put(b"k" * 16, b"", cls="swpa")  # arg-type
hifc.Namespace.open("ram://x").lookup([]).nothing()  # attr-defined
hifc.HiFCache  # attr-defined
"""

MYPY = """
[mypy]
strict = True
follow_imports_for_stubs = False

[mypy-hifc.*]
follow_imports = silent

[mypy-torch.*,transformers.*,cupy.*,matplotlib.*,jinja2.*,yaml.*]
ignore_missing_imports = True
follow_imports = skip
"""


@pytest.mark.slow
def test_a_type_checker_passes_what_is_right_and_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "mypy.ini").write_text(MYPY)
    package = Path(hifc.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-color-output", "good.py", "bad.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = {
        (number, line.rpartition("  # ")[2])
        for number, line in enumerate(BAD.split("\n"), 1)
        if "  # " in line
    }
    lines = re.findall(r"^(\S+?):(\d+): error: .*\[(.+?)\]$", result.stdout, re.MULTILINE)
    assert {(int(line), code) for file, line, code in lines if file == "bad.py"} == expected, (
        result.stdout
    )
    assert [file for file, _, _ in lines if file != "bad.py"] == [], result.stdout
