# SPDX-License-Identifier: Apache-2.0
"""Calls and includes in driver/ go down only: a floor knows those below it and none above.

docs/architecture.md describes the floors. The sources are read as text: a name counts as a call
where it is an identifier of a file that does not define it, so that function pointers count too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

DRIVER = Path(__file__).parents[2] / "driver"

# Folders, lowest first. A folder may use those before it, but for what ALONE says.
FOLDERS = ("util", "device", "engine", "format", "policy", "admin", "namespace")
# Policies see keys, lengths and clocks only, so that a replay needs nothing else.
ALONE = {"policy": {"util"}}

# The floors of the namespace, lowest first. Files of one floor do not call one another.
NAMESPACE = (
    {
        "admission",
        "caller_memory",
        "checksum_tables",
        "events",
        "index",
        "pages",
        "part_counts",
        "segment_set",
        "visit",
    },
    {"memory"},
    {"segments", "ticket"},
    {"batch", "leases", "lookup", "room", "seal"},
    {"durability", "read", "streams"},
    {"append", "get"},
    {"prefetch", "reclaim", "reserve"},
    {"acknowledge", "janitor", "open", "prepare", "rings"},
    {"check", "repair", "request", "state"},
    {"wait"},
    {"ns"},
)
# engine.c, queue.c and reactor.c are one component in three files.
COMPONENTS = ({"engine/engine", "engine/queue", "engine/reactor"},)

DEFINITION = re.compile(
    r"^(?!static\b|typedef\b|else\b|return\b)(?:HIFC_API\s+)?[a-z_][\w \*]*?\b(\w+)"
    r"\([^;{}]*\)\s*\{",
    re.MULTILINE,
)
TABLE = re.compile(r"^const struct \w+ (\w+)\s*(?:\[\])?\s*=", re.MULTILINE)
INCLUDE = re.compile(r'#include "([a-z_]+)/([a-z0-9_]+)\.h"')


@cache
def sources() -> dict[str, str]:
    """Text of every C file by its path without suffix, without comments and strings."""
    found = {}
    for path in sorted(DRIVER.rglob("*.c")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        found[str(path.relative_to(DRIVER).with_suffix(""))] = text
    return found


@cache
def calls() -> dict[str, dict[str, set[str]]]:
    """For each file, the files that it calls and by which names."""
    defined = {}
    for name, text in sources().items():
        for match in [*DEFINITION.finditer(text), *TABLE.finditer(text)]:
            defined[match[1]] = name
    edges: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, text in sources().items():
        code = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
        code = re.sub(r"\b(?:struct|enum|union)\s+\w+", "", code)
        for word in set(re.findall(r"\b[a-z_]\w+\b", code)):
            target = defined.get(word)
            if target and target != name:
                edges[name][target].add(word)
    return edges


def folder(name: str) -> str:
    return name.split("/", 1)[0]


def may_use(user: str, used: str) -> bool:
    """Whether one folder may use another."""
    if user == used:
        return True
    return FOLDERS.index(used) < FOLDERS.index(user) and used in ALONE.get(user, set(FOLDERS))


def test_every_folder_and_file_has_a_floor() -> None:
    assert {folder(name) for name in sources()} == set(FOLDERS)
    listed = [name for floor in NAMESPACE for name in floor]
    there = [name.split("/")[1] for name in sources() if folder(name) == "namespace"]
    assert sorted(listed) == sorted(there)


def test_calls_go_down_from_folder_to_folder() -> None:
    up = [
        f"{user} calls {', '.join(sorted(names))} of {used}"
        for user, targets in calls().items()
        for used, names in targets.items()
        if not may_use(folder(user), folder(used))
    ]
    assert not up


def test_includes_go_down_from_folder_to_folder() -> None:
    up = [
        f"{path.relative_to(DRIVER)} includes {match[1]}/{match[2]}.h"
        for path in sorted(DRIVER.rglob("*.[ch]"))
        for match in INCLUDE.finditer(path.read_text())
        if match[1] != "include" and not may_use(path.parent.name, match[1])
    ]
    assert not [line for line in up if not line.startswith("include/")]


def test_calls_go_down_within_the_namespace() -> None:
    floor_of = {f"namespace/{name}": i for i, floor in enumerate(NAMESPACE) for name in floor}
    up = [
        f"{user} (floor {floor_of[user]}) calls {', '.join(sorted(names))} of {used} "
        f"(floor {floor_of[used]})"
        for user, targets in calls().items()
        for used, names in targets.items()
        if user in floor_of and used in floor_of and floor_of[used] >= floor_of[user]
    ]
    assert not up


def test_no_files_call_in_a_circle() -> None:
    component = {name: min(group) for group in COMPONENTS for name in group}
    edges: dict[str, set[str]] = defaultdict(set)
    for user, targets in calls().items():
        for used in targets:
            a, b = component.get(user, user), component.get(used, used)
            if a != b:
                edges[a].add(b)
    order: list[str] = []
    trail: list[str] = []

    def visit(name: str) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in order:
            return
        trail.append(name)
        for used in sorted(edges[name]):
            visit(used)
        order.append(trail.pop())

    for name in sources():
        visit(component.get(name, name))


def test_the_reading_of_sources_sees_calls_and_pointers() -> None:
    """Without it, a regular expression that matches nothing would let all of this pass."""
    assert calls()["namespace/ns"]["namespace/janitor"] >= {"ns_janitor_start"}
    assert "ns_batch_xfer_done" in calls()["namespace/append"]["namespace/batch"]
    assert "hifc_device_ram" in calls()["device/device"]["device/ram"]
    assert sum(len(targets) for targets in calls().values()) > 150
