# SPDX-License-Identifier: Apache-2.0
"""Options of Namespace.open as struct hifc_open_opts, each checked by name."""

from __future__ import annotations

import difflib
from typing import TypedDict

from hifc.errors import ConfigError
from hifc.native_lib import layouts
from hifc.util import checking
from hifc.util.units import parse_size

_DRIVES = {"reactor": 0, "inline": 1}
_COUNT_MAX = (1 << 32) - 1
# What libhifc takes of those that do not go as far as their field.
_LIMITS = {
    "queue_depth": 4096,
    "requests_max": 1 << 20,
    "batch_inflight": 32,
    "prefetch_inflight": 4096,
    "index_entries_max": 1 << 34,
}
_ADMISSIONS = {"always": 0, "second_use": 1, "budget": 2}


class OpenOptions(TypedDict, total=False):
    """Options of Namespace.open beside the usual ones; as in struct hifc_open_opts."""

    queue_depth: int
    requests_max: int
    batch_inflight: int
    batch_size_max: int | str
    reservations_max: int
    reservation_timeout_ms: int
    leases_max: int
    events_max: int
    index_entries_max: int
    admission: str  # always, second_use, budget
    reinsert_percent: int
    write_budget_per_day: int | str
    command_timeout_ms: int
    spin_us: int
    prefetch_inflight: int
    owner_socket: bool


def _pick(table: dict[str, int], value: object, name: str) -> int:
    if isinstance(value, str) and value in table:
        return table[value]
    raise ConfigError(f"{name}: {value!r} is none of {', '.join(table)}")


def open_opts(
    read_only: bool, drive: str, pool_size: int | str, options: OpenOptions
) -> layouts.OpenOpts:
    known = OpenOptions.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"open: unknown option {name}{hint}")
    opts = layouts.OpenOpts(
        read_only=checking.flag("read_only", read_only),
        drive=_pick(_DRIVES, drive, "drive"),
        pool_size_bytes=parse_size(pool_size, "pool_size"),
        # A batch has half a segment at most, which is less than this field holds.
        batch_size_max_bytes=min(
            parse_size(options.get("batch_size_max", 0), "batch_size_max"), _COUNT_MAX
        ),
        admission=_pick(_ADMISSIONS, options.get("admission", "always"), "admission"),
        write_budget_bytes_per_day=parse_size(
            options.get("write_budget_per_day", 0), "write_budget_per_day"
        ),
        no_owner_socket=not checking.flag("owner_socket", options.get("owner_socket", True)),
    )
    if "reinsert_percent" in options:
        opts.reinsert_percent_plus1 = _count(options, "reinsert_percent") + 1
    for name in (
        "queue_depth",
        "requests_max",
        "batch_inflight",
        "reservations_max",
        "reservation_timeout_ms",
        "leases_max",
        "events_max",
        "index_entries_max",
        "command_timeout_ms",
        "spin_us",
        "prefetch_inflight",
    ):
        if name in options:
            setattr(opts, name, _count(options, name))
    return opts


def _count(options: OpenOptions, name: str) -> int:
    value: object = dict(options)[name]
    most = _LIMITS.get(name, _COUNT_MAX)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ConfigError(f"open: {name} is {value!r}: use a count from 0 to {most}")
    return value
