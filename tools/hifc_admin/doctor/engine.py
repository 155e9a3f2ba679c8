# SPDX-License-Identifier: Apache-2.0
"""doctor's checks of running engines, by their counters since they opened their device."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterator

from hifc_admin.doctor.checks import Check, Checks, Engine, Finding, Scene, failed, passed, warned
from hifc_admin.text import size

PAGE_BYTES_2M = 2 << 20
# A share says something from this many on.
CAP_IPC_LOCK = 14  # of linux/capability.h
COUNT_MIN = 1000
ACCURACY_LOW = 0.5
HIT_LOW = 0.2
BOUNCE_HIGH = 0.1
AMPLIFICATION_HIGH = 1.5
SEGMENTS_LOW = 3


def errors(engine: Engine) -> Iterator[Finding]:
    stats = engine.stats
    failures, corrupt = stats["device_error_count"], stats["corrupt_count"]
    if failures:
        yield failed(
            f"the device failed {failures} commands",
            f"device_error_count on {engine.socket}",
            f"hifc-admin smart {shlex.quote(engine.uri)}; the engine's log has the status of each",
        )
    if corrupt:
        yield failed(
            f"{corrupt} values did not match their checksum",
            f"corrupt_count on {engine.socket}",
            f"once the engine has stopped: hifc-admin fsck {shlex.quote(engine.uri)} --payload",
        )
    if not failures and not corrupt:
        yield passed("no command failed, no checksum differed")


def space(engine: Engine) -> Iterator[Finding]:
    stats = engine.stats
    if stats["segments_damaged"]:
        lost = stats["segments_damaged"] * stats["segment_size_bytes"]
        yield failed(
            f"{stats['segments_damaged']} segments are damaged: {size(lost)} are not used",
            f"segments_damaged on {engine.socket}",
            f"once the engine has stopped: hifc-admin fsck {shlex.quote(engine.uri)} --repair",
        )
    if stats["no_space_count"]:
        yield warned(
            f"{stats['no_space_count']} puts found no space: swap fills the device",
            f"{stats['entries_swap']} swap entries, {stats['segments_free']} free segments",
            "a larger device, or fewer paused sequences",
        )


def direct(engine: Engine) -> Iterator[Finding]:
    if not engine.stats["direct"] and "tmpfs" not in engine.uri:
        yield warned(
            "the page cache stands between the engine and its device",
            f"direct is 0 on {engine.socket}",
            "put the file on ext4 or xfs, or use a block device or a bound drive",
        )


def bounces(engine: Engine) -> Iterator[Finding]:
    stats = engine.stats
    moved = stats["get_bytes"] + stats["put_bytes"]
    share = stats["bounce_bytes"] / moved if moved else 0.0
    if share > BOUNCE_HIGH:
        yield warned(
            f"{share:.0%} of what was moved was copied by the CPU as well",
            f"bounce_bytes {size(stats['bounce_bytes'])} of {size(moved)}",
            "use buffers of the pool (namespace.buffer), on page boundaries",
        )


def queue(engine: Engine) -> Iterator[Finding]:
    stats = engine.stats
    asked = stats["get_count"] + stats["put_count"] + stats["retry_count"]
    if asked > COUNT_MIN and stats["retry_count"] > asked // 10:
        yield warned(
            f"{stats['retry_count'] / asked:.0%} of requests were answered Retry",
            f"retry_count on {engine.socket}",
            "raise requests_max or pool_size, or submit less at a time",
        )


def amplification(engine: Engine) -> Iterator[Finding]:
    stats = engine.stats
    if stats["put_bytes"] < stats["segment_size_bytes"] * SEGMENTS_LOW:
        return
    found = stats["device_write_bytes"] / stats["put_bytes"]
    evidence = f"{size(stats['device_write_bytes'])} written for {size(stats['put_bytes'])}"
    if found > AMPLIFICATION_HIGH:
        yield warned(
            f"write amplification is {found:.2f}",
            f"{evidence}; {size(stats['reinserted_bytes'])} of it reinserted",
            "a lower reinsert_percent, larger values, or admission second_use",
        )
    else:
        yield passed(f"write amplification {found:.2f}", evidence)


def budget(engine: Engine) -> Iterator[Finding]:
    total, left = (
        engine.stats.get(name, 0) for name in ("write_budget_bytes", "write_budget_left_bytes")
    )
    if total and left < total // 100:
        yield warned(
            f"the write budget of {size(total)} a day is used up: puts are declined",
            f"{size(left)} left, {engine.stats['rejected_count']} puts declined",
            "a larger write_budget_per_day, or admission second_use",
        )


def hits(engine: Engine) -> Iterator[Finding]:
    asked = engine.stats["get_count"] + engine.stats["miss_count"]
    if asked < COUNT_MIN:
        return
    ratio = engine.stats["get_count"] / asked
    detail = f"{ratio:.0%} of gets were found"
    if ratio < HIT_LOW and engine.stats["evicted_count"]:
        yield warned(
            detail,
            f"{engine.stats['evicted_count']} entries were evicted",
            "a larger device holds more; admission second_use keeps what comes back",
        )
    else:
        yield passed(detail, f"of {asked}")


def prefetch(engine: Engine) -> Iterator[Finding]:
    said = engine.stats.get("published", {})
    issued, used = said.get("prefetch_issued", 0), said.get("prefetch_hit", 0)
    if issued < COUNT_MIN:
        return
    accuracy = used / issued
    evidence = f"{used:.0f} of {issued:.0f} prefetched blocks were used"
    if accuracy < ACCURACY_LOW:
        yield warned(
            f"prefetches are right in {accuracy:.0%}",
            evidence,
            "a lower prefetch_degree, or a longer prefetch_window",
        )
    else:
        yield passed(f"prefetches are right in {accuracy:.0%}", evidence)


def engine_limits(scene: Scene) -> Iterator[Finding]:
    """The limit that each process runs with, whatever a new login would get. None holds for one
    with CAP_IPC_LOCK, such as root's."""
    for engine in scene.engines:
        status = scene.system.attribute(f"/proc/{engine.pid}/status") or ""
        effective = re.search(r"^CapEff:\s+([0-9a-f]+)", status, re.M)
        if effective is not None and int(effective[1], 16) & 1 << CAP_IPC_LOCK:
            continue
        limits = scene.system.attribute(f"/proc/{engine.pid}/limits") or ""
        match = re.search(r"^Max locked memory\s+(\S+)", limits, re.M)
        pool = int(engine.stats.get("buffer_size_bytes", 0))
        if not engine.uri.startswith("spdk://") or match is None or not match[1].isdigit():
            continue
        if int(match[1]) < pool + 8 * PAGE_BYTES_2M:
            yield warned(
                f"process {engine.pid} may lock {size(int(match[1]))}, its pool has {size(pool)}",
                f"/proc/{engine.pid}/limits",
                "for a service: LimitMEMLOCK=infinity in its unit; else hifc-admin install",
                engine.uri,
            )


def _of_each(check: Callable[[Engine], Iterator[Finding]]) -> Check:
    """A check of one engine, as one of all, which says which engine it found what of. What an
    engine does not tell, being of another version, say, is no reason to leave the others out."""

    def check_all(scene: Scene) -> Iterator[Finding]:
        for engine in scene.engines:
            try:
                found = list(check(engine))
            except (KeyError, TypeError) as error:
                fix = "use the hifc-admin of that engine's own version"
                found = [warned("could not check", f"{engine.socket} does not tell {error}", fix)]
            for finding in found:
                yield dataclasses.replace(finding, subject=engine.uri)

    return check_all


CHECKS: Checks = (
    ("engine errors", _of_each(errors)),
    ("space", _of_each(space)),
    ("direct i/o", _of_each(direct)),
    ("copies", _of_each(bounces)),
    ("queues", _of_each(queue)),
    ("write amplification", _of_each(amplification)),
    ("write budget", _of_each(budget)),
    ("hits", _of_each(hits)),
    ("prefetch", _of_each(prefetch)),
    ("engine's locked memory", engine_limits),
)
