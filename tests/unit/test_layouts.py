# SPDX-License-Identifier: Apache-2.0
"""Every struct that C and Python share: each field stands in Python where the compiler puts it.

Names, offsets, sizes and kinds come from programs that are generated from the headers and the
kernels' sources and compiled here; hifc.native_lib.layouts and hifc.kernels.table say the same.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hifc.kernels import heat
from hifc.kernels import table as kernel_table
from hifc.native_lib import layouts, libhifc

REPOSITORY = Path(__file__).parents[2]
INCLUDE = REPOSITORY / "driver/include"
NATIVE = REPOSITORY / "native"
HEADERS = sorted(INCLUDE.glob("*.h"))
# C++ names the kind of a type; the C compiler lays the same structs out in the same way.
COMPILER = ("g++", "-x", "c++", "-std=gnu++17", "-w", f"-I{INCLUDE}", f"-I{NATIVE}")

PROGRAM = """
#include <cstddef>
#include <cstdio>
#include <type_traits>
{includes}
using namespace hifc;
template <typename T> constexpr char kind()
{{
    using E = std::remove_cv_t<std::remove_all_extents_t<T>>;
    return std::is_pointer_v<E>          ? 'p'
           : std::is_same_v<E, char>     ? 'c'
           : std::is_floating_point_v<E> ? 'f'
           : std::is_class_v<E>          ? 's'
           : std::is_signed_v<E>         ? 'i'
                                         : 'u';
}}
int main()
{{
{lines}
}}
"""


class Field(NamedTuple):
    offset: int
    size: int
    kind: str  # u, i, f: numbers; c: characters; p: pointers; s: structs; of an array, its items'


Layout = dict[str, Field]  # in the order of the struct; the name "" is the whole of it


def field_names(source: str, struct: str) -> list[str]:
    """The names of the members of a struct, from its source."""
    bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", source, flags=re.DOTALL)
    found = re.search(rf"struct {struct} \{{(.*?)\n\}};", bare, re.DOTALL)
    assert found, struct
    declared = [line for line in found[1].split(";") if line.strip()]
    return [
        re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", name))[-1]
        for line in declared
        for name in line.split(",")
    ]


def layouts_of_compiler(
    folder: Path, includes: list[Path], structs: dict[str, list[str]]
) -> dict[str, Layout]:
    """What the compiler says of structs, given by name with the names of their members."""
    lines = []
    for struct, names in structs.items():
        lines.append(
            f'    {{ using S = struct {struct}; std::printf("{struct}  0 %zu s\\n", sizeof(S));'
        )
        lines += [
            f'    std::printf("{struct} {name} %zu %zu %c\\n", offsetof(S, {name}), '
            f"sizeof(S::{name}), kind<decltype(S::{name})>());"
            for name in names
        ]
        lines.append("    }")
    text = "\n".join(f'#include "{path}"' for path in includes)
    text = "namespace hifc {}\n" + text  # which the headers of C do not have
    source = folder / "layouts.cpp"
    source.write_text(PROGRAM.format(includes=text, lines="\n".join(lines)))
    subprocess.run([*COMPILER, source, "-o", folder / "layouts", "-lm"], check=True)
    out = subprocess.run([folder / "layouts"], check=True, capture_output=True, text=True).stdout
    found: dict[str, Layout] = {}
    for line in out.splitlines():
        struct, name, offset, size, kind = line.split(" ")
        found.setdefault(struct, {})[name] = Field(int(offset), int(size), kind)
    return found


# ---- as Python has them


def of_ctypes(struct: type[ctypes.Structure]) -> Layout:
    found = {"": Field(0, ctypes.sizeof(struct), "s")}
    for name, kind, *_ in struct._fields_:
        place = getattr(struct, name)
        item: Any = kind
        while hasattr(item, "_length_") and hasattr(item, "_type_"):
            item = item._type_
        code = "s" if issubclass(item, ctypes.Structure) else KIND_OF_CODE[item._type_]
        found[name] = Field(place.offset, place.size, code)
    return found


KIND_OF_CODE = {
    **dict.fromkeys("BHILQ", "u"),
    **dict.fromkeys("bhilq", "i"),
    **dict.fromkeys("fd", "f"),
    "c": "c",
    "P": "p",
}


def of_numpy(dtype: np.dtype[Any]) -> Layout:
    found = {"": Field(0, dtype.itemsize, "s")}
    for name, (kind, offset, *_) in (dtype.fields or {}).items():
        code = "s" if kind.base.names else kind.base.kind
        found[name] = Field(offset, kind.itemsize, code)
    return found


def ctypes_structs() -> dict[str, type[ctypes.Structure]]:
    """Those of hifc.native_lib.layouts by their names in C, which begin their docstrings."""
    found = {}
    for _, struct in inspect.getmembers(layouts, inspect.isclass):
        if issubclass(struct, ctypes.Structure) and struct is not ctypes.Structure:
            said = re.match(r"struct (\w+)", struct.__doc__ or "")
            assert said, struct
            found[said[1]] = struct
    return found


NUMPY_STRUCTS = {
    "hifc_key": "KEY",
    "hifc_req": "REQUEST",
    "hifc_entry": "ENTRY",
    "hifc_descriptor": "DESCRIPTOR",
    "hifc_event": "EVENT",
}


def as_addresses(layout: Layout) -> Layout:
    """Python's types for kernels hold an address as a number, and a key as its bytes."""
    return {
        name: field._replace(kind="u" if field.kind == "p" or name == "key" else field.kind)
        for name, field in layout.items()
    }


# ---- the tests


@pytest.fixture(scope="module")
def of_headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Layout]:
    text = "".join(path.read_text() for path in HEADERS)
    structs = {
        name: field_names(text, name) for name in re.findall(r"^struct (\w+) \{", text, re.M)
    }
    folder = tmp_path_factory.mktemp("headers")
    return layouts_of_compiler(folder, [INCLUDE / "hifc.h"], structs)


def test_every_struct_of_the_headers_is_described(of_headers: dict[str, Layout]) -> None:
    described = {*ctypes_structs(), *NUMPY_STRUCTS}
    assert described == set(of_headers) == set(libhifc._SIZES)
    types = {name for name in vars(layouts) if isinstance(getattr(layouts, name), np.dtype)}
    assert types == set(NUMPY_STRUCTS.values())


@pytest.mark.parametrize("name", sorted(ctypes_structs()))
def test_ctypes_structs_are_laid_out_as_in_c(of_headers: dict[str, Layout], name: str) -> None:
    found = of_ctypes(ctypes_structs()[name])
    if "key" in found:  # struct hifc_key, bytes in Python
        found["key"] = found["key"]._replace(kind="s")
    assert list(found.items()) == list(of_headers[name].items())


@pytest.mark.parametrize("name", sorted(NUMPY_STRUCTS))
def test_numpy_types_are_laid_out_as_in_c(of_headers: dict[str, Layout], name: str) -> None:
    dtype = getattr(layouts, NUMPY_STRUCTS[name])
    if name == "hifc_key":  # an array of bytes
        assert dtype.itemsize == of_headers[name][""].size
        return
    expected = as_addresses(of_headers[name])
    assert list(of_numpy(dtype).items()) == list(expected.items())


@pytest.fixture(scope="module")
def of_kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Layout]]:
    known: dict[str, dict[str, Layout]] = {}
    text = "".join(path.read_text() for path in sorted(NATIVE.glob("*.cu*")))

    def of_source(source: str) -> dict[str, Layout]:
        if source not in known:
            declared = re.findall(
                r"HIFC_KERNEL\((\w+), [\w:]+, (?:hifc::)?(\w+)\)", (NATIVE / source).read_text()
            )
            structs = {struct: field_names(text, struct) for _, struct in declared}
            structs["Divider"] = field_names(text, "Divider")
            if source == "heat.cu":
                structs |= {name: field_names(text, name) for name in ("HeatState", "Range")}
            if source == "victims.cu":
                structs["Order"] = field_names(text, "Order")
            folder = tmp_path_factory.mktemp("kernels")
            found = layouts_of_compiler(folder, [NATIVE / source], structs)
            known[source] = found | {kernel: found[struct] for kernel, struct in declared}
        return known[source]

    return of_source


@pytest.mark.parametrize("name", sorted(kernel_table.KERNELS))
def test_structs_of_kernels_are_laid_out_as_in_their_sources(
    of_kernels: Callable[[str], dict[str, Layout]], name: str
) -> None:
    kernel = kernel_table.KERNELS[name]
    found = of_numpy(kernel.args)
    assert list(found.items()) == list(as_addresses(of_kernels(kernel.source)[name]).items())


def test_every_kernel_is_described() -> None:
    text = "".join(path.read_text() for path in NATIVE.glob("*.cu"))
    assert set(re.findall(r"HIFC_KERNEL\((\w+),", text)) == set(kernel_table.KERNELS)


def test_structs_inside_those_of_kernels(of_kernels: Callable[[str], dict[str, Layout]]) -> None:
    assert list(of_numpy(kernel_table.DIVIDER).items()) == list(
        of_kernels("pack.cu")["Divider"].items()
    )
    found = of_kernels("heat.cu")
    assert found["HeatState"][""].size == 4 * heat._STATE_WORDS
    assert 2 * found["Range"][""].size == 4 * heat._RANGE_WORDS  # one a boundary
    assert of_kernels("victims.cu")["Order"][""].size == 4 * heat._ORDER_WORDS


def test_a_field_that_moves_or_grows_is_seen(of_headers: dict[str, Layout]) -> None:
    """Of every struct each field once: of another size, left out, behind another, swapped."""
    for name, struct in ctypes_structs().items():
        fields: list[Any] = list(struct._fields_)
        for at, (field, kind, *_) in enumerate(fields):
            other = ctypes.c_uint32 if ctypes.sizeof(kind) == 8 else ctypes.c_uint64
            wrong = [
                [*fields[:at], (field, other), *fields[at + 1 :]],
                [*fields[:at], *fields[at + 1 :]],
                [*fields[:at], ("another", ctypes.c_uint8), *fields[at:]],
            ]
            if at + 1 < len(fields):
                wrong.append([*fields[:at], fields[at + 1], fields[at], *fields[at + 2 :]])
            for moved in wrong:
                changed = type("Changed", (ctypes.Structure,), {"_fields_": moved})
                found = list(of_ctypes(changed).items())
                assert found != list(of_headers[name].items()), (name, field)
