# SPDX-License-Identifier: Apache-2.0
"""The SMART / health log page of the NVMe base specification (log identifier 02h), decoded.

Multi-byte fields are little-endian; 128-bit counters become Python integers. Media write
amplification is not in this page and is not guessed from it.
"""

from __future__ import annotations

import dataclasses

from hifc_admin.result import Problem, Severity

LOG_BYTES = 512
DATA_UNIT_BYTES = 1000 * 512
KELVIN_OFFSET = 273
SENSORS = 8
# Above this share of the rated endurance a drive should be replaced soon.
WORN_PERCENT = 90

# Byte 0, bit by bit: (code, what it means).
CRITICAL_WARNINGS = (
    ("spare-low", "available spare is below its threshold"),
    ("temperature", "temperature is above or below a threshold"),
    ("unreliable", "the subsystem is degraded by media or internal errors"),
    ("read-only", "the media has been placed in read-only mode"),
    ("backup-failed", "the volatile memory backup device has failed"),
    ("pmr-unreliable", "the persistent memory region is read-only or unreliable"),
)


@dataclasses.dataclass(frozen=True)
class SmartLog:
    critical_warnings: tuple[str, ...]
    temperature_celsius: int
    available_spare_percent: int
    available_spare_threshold_percent: int
    percentage_used: int
    data_read_bytes: int
    data_written_bytes: int
    host_read_commands: int
    host_write_commands: int
    controller_busy_minutes: int
    power_cycles: int
    power_on_hours: int
    unsafe_shutdowns: int
    media_errors: int
    error_log_entries: int
    warning_temperature_minutes: int
    critical_temperature_minutes: int
    temperature_sensors_celsius: tuple[int | None, ...]  # None: that sensor does not exist
    # How often, and how long, the drive slowed down to cool: lightly, then heavily.
    throttled_light_count: int
    throttled_heavy_count: int
    throttled_light_seconds: int
    throttled_heavy_seconds: int


def decode(log: bytes) -> SmartLog:
    """Raises ValueError unless log has 512 bytes."""
    if len(log) != LOG_BYTES:
        raise ValueError(f"a SMART / health log page has {LOG_BYTES} bytes, this one {len(log)}")

    def field(start: int, width: int) -> int:
        return int.from_bytes(log[start : start + width], "little")

    sensors = [field(200 + 2 * i, 2) for i in range(SENSORS)]
    return SmartLog(
        critical_warnings=tuple(
            code for bit, (code, _) in enumerate(CRITICAL_WARNINGS) if log[0] & 1 << bit
        ),
        temperature_celsius=field(1, 2) - KELVIN_OFFSET,
        available_spare_percent=log[3],
        available_spare_threshold_percent=log[4],
        percentage_used=log[5],
        data_read_bytes=field(32, 16) * DATA_UNIT_BYTES,
        data_written_bytes=field(48, 16) * DATA_UNIT_BYTES,
        host_read_commands=field(64, 16),
        host_write_commands=field(80, 16),
        controller_busy_minutes=field(96, 16),
        power_cycles=field(112, 16),
        power_on_hours=field(128, 16),
        unsafe_shutdowns=field(144, 16),
        media_errors=field(160, 16),
        error_log_entries=field(176, 16),
        warning_temperature_minutes=field(192, 4),
        critical_temperature_minutes=field(196, 4),
        temperature_sensors_celsius=tuple(k - KELVIN_OFFSET if k else None for k in sensors),
        throttled_light_count=field(216, 4),
        throttled_heavy_count=field(220, 4),
        throttled_light_seconds=field(224, 4),
        throttled_heavy_seconds=field(228, 4),
    )


def problems(subject: str, log: SmartLog) -> list[Problem]:
    """What in the log asks for an action."""
    found = [
        Problem(code, subject, meaning, "critical warning of the health log", "replace the drive")
        for code, meaning in CRITICAL_WARNINGS
        if code in log.critical_warnings and code != "temperature"
    ]
    if "temperature" in log.critical_warnings:
        found.append(
            Problem(
                "temperature",
                subject,
                dict(CRITICAL_WARNINGS)["temperature"],
                f"{log.temperature_celsius} C",
                "cool the drive: airflow, heat sink, or a lower write budget",
            )
        )
    if log.percentage_used >= WORN_PERCENT:
        found.append(
            Problem(
                "worn",
                subject,
                "the drive has used up most of the endurance its vendor rates it for",
                f"percentage used: {log.percentage_used} %",
                "plan to replace the drive",
                Severity.WARNING,
            )
        )
    if log.media_errors:
        found.append(
            Problem(
                "media-errors",
                subject,
                "the drive saw data it could not correct",
                f"media and data integrity errors: {log.media_errors}",
                "hifc-admin fsck URI --payload tells which entries are hit",
                Severity.WARNING,
            )
        )
    return found
