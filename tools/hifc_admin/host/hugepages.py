# SPDX-License-Identifier: Apache-2.0
"""hugepages: shows huge pages, or reserves them and mounts a hugetlbfs for them."""

from __future__ import annotations

import argparse
import dataclasses

from hifc.errors import ConfigError
from hifc.util.units import parse_size
from hifc_admin import text
from hifc_admin.host import memory
from hifc_admin.host import system as systems
from hifc_admin.host.memory import HugePages
from hifc_admin.host.plan import Plan
from hifc_admin.host.system import System
from hifc_admin.parsing import ALL_OPTIONS, Verbs, add_verb, whole_number
from hifc_admin.result import Exit, Failure, Problem, Result
from hifc_admin.verbs.host import require_root


def register(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "hugepages",
        hugepages,
        "show huge pages, or reserve them",
        "hifc-admin hugepages --count 1024 --node 0 --persist",
        honours=ALL_OPTIONS,
    )
    parser.add_argument(
        "--count", type=whole_number(0), metavar="N", help="how many there should be"
    )
    parser.add_argument("--size", help="of one page: 2MiB or 1GiB (default: the host's own)")
    parser.add_argument("--node", type=whole_number(0), metavar="N", help="on this NUMA node only")
    parser.add_argument("--persist", action="store_true", help="also at each boot")


def hugepages(arguments: argparse.Namespace) -> Result:
    system = systems.of(arguments)
    if arguments.count is None:
        if arguments.persist:
            detail, fix = "--persist wants to know how many", "add --count N"
            raise Failure(Exit.USAGE, Problem("usage", "hugepages", detail, fix=fix))
        return _result(system, Plan("hugepages"), False)
    require_root(system, arguments)
    pages = _find(system, arguments.size, arguments.node)
    _require_memory(system, pages, arguments.count)
    plan = Plan("hugepages")
    _plan(plan, system, pages, arguments.count, arguments.persist)
    if arguments.dry_run:
        return _result(system, plan, True)
    plan.run(arguments.announce)
    result = _result(system, plan, False)
    got = _find(system, arguments.size, arguments.node).total
    if got < arguments.count:
        detail = f"the kernel found memory for {got} pages of {arguments.count}"
        fix = "memory is fragmented: repeat it, or reserve them at boot with --persist and reboot"
        name = f"{pages.folder}/nr_hugepages"
        result.problems.append(Problem("too-few-pages", "hugepages", detail, name, fix))
        result.exit = Exit.PARTLY
    return result


def _find(system: System, size: str | None, node: int | None) -> HugePages:
    """Raises Failure where this host has no such pages."""
    try:
        wanted = memory.default_size_bytes(system) if size is None else parse_size(size, "--size")
    except ConfigError as error:
        raise Failure(Exit.USAGE, Problem("usage", "--size", str(error))) from error
    found = memory.huge_pages(system)
    for pages in found:
        if (pages.size_bytes, pages.node) == (wanted, node):
            return pages
    listed = ", ".join(
        text.size(pages.size_bytes) + ("" if pages.node is None else f" on node {pages.node}")
        for pages in found
    )
    where = "" if node is None else f" on node {node}"
    detail = f"this host has no huge pages of {text.size(wanted)}{where}"
    fix = f"there are: {listed}" if listed else "the kernel has none at all (CONFIG_HUGETLBFS)"
    raise Failure(Exit.USAGE, Problem("no-such-pages", "hugepages", detail, memory.POOLS, fix))


def _require_memory(system: System, pages: HugePages, count: int) -> None:
    available = memory.meminfo(system, "MemAvailable")
    wanted = (count - pages.total) * pages.size_bytes
    if available is not None and wanted > available:
        detail = f"{count} pages take {text.size(wanted)} more than there is free memory for"
        evidence = f"/proc/meminfo: MemAvailable {text.size(available)}"
        most = pages.total + available // pages.size_bytes // 2
        fix = f"use a smaller count, such as {most}, or stop what uses memory"
        problem = Problem("not-enough-memory", "hugepages", detail, evidence, fix)
        raise Failure(Exit.PREREQUISITE, problem)


def _plan(plan: Plan, system: System, pages: HugePages, count: int, persist: bool) -> None:
    name, before = f"{pages.folder}/nr_hugepages", pages.total
    if count != before:
        plan.add(
            f"write {count} to {name}, which says {before}",
            lambda: system.write(name, f"{count}\n"),
            lambda: system.write(name, f"{before}\n"),
        )
    mounts = [mount.size_bytes for mount in memory.huge_mounts(system)]
    if pages.size_bytes not in mounts:
        where = memory.DEFAULT_MOUNT
        if mounts or system.names(where):
            where = f"/dev/hugepages-{pages.size_bytes >> 10}kB"
        options = f"pagesize={pages.size_bytes >> 10}K"
        plan.add(
            f"mount a hugetlbfs for pages of {text.size(pages.size_bytes)} on {where}",
            lambda: system.mount("hugetlbfs", where, options),
            lambda: _unmount(system, where),
        )
    if persist:
        node = "" if pages.node is None else f"-node{pages.node}"
        file = f"/etc/tmpfiles.d/hifc-hugepages-{pages.size_bytes >> 10}kB{node}.conf"
        line = f"# by hifc-admin hugepages --persist\nw {name} - - - - {count}\n"
        plan.put(system, file, line, f"{count} pages at each boot")


def _unmount(system: System, where: str) -> None:
    if any(mount.folder == where for mount in memory.huge_mounts(system)):
        system.unmount(where)


def _result(system: System, plan: Plan, dry_run: bool) -> Result:
    found = memory.huge_pages(system)
    mounts = memory.huge_mounts(system)
    data = {
        "pages": [dataclasses.asdict(pages) for pages in found],
        "mounts": [dataclasses.asdict(mount) for mount in mounts],
        "steps": plan.lines(),
        "changed": bool(plan.steps) and not dry_run,
    }
    if dry_run:
        return Result(data, plan.would())
    return Result(data, lines(found, mounts))


def lines(found: list[HugePages], mounts: list[memory.HugeMount]) -> list[str]:
    """For people."""
    rows = [
        (
            text.size(pages.size_bytes),
            "all" if pages.node is None else pages.node,
            pages.total,
            pages.free,
            pages.surplus,
        )
        for pages in found
    ]
    listed = [f"hugetlbfs on {m.folder}, pages of {text.size(m.size_bytes)}" for m in mounts]
    table = text.table(("PAGE", "NODE", "TOTAL", "FREE", "SURPLUS"), rows)
    return table + (listed or ["no hugetlbfs is mounted"])
