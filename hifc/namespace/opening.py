# SPDX-License-Identifier: Apache-2.0
"""From a configuration to an open namespace, formatted where the configuration says so."""

from __future__ import annotations

import errno
import logging
import re
from pathlib import Path
from urllib.parse import unquote

from hifc.blocks.host_tier import gate_bytes
from hifc.config import Config
from hifc.errors import ConfigError, DeviceBusy, FormatError
from hifc.namespace.namespace import Namespace
from hifc.staging.bar import BarProvider
from hifc.util.units import format_size

_LOG = logging.getLogger("hifc")


def open_namespace(config: Config, bar: BarProvider | None = None) -> Namespace:
    """Opens, and formats where the configuration says so, the namespace of a configuration.

    The pool has room for the memory budget and the swap buffer: a smaller pool_size is raised, with
    a warning. Staging gpu takes swap_buffer_size of bar.
    """
    if not config.device:
        raise ConfigError("device: missing; e.g. file:///var/lib/hifc/kv?size=8GiB")
    if config.format != "never" and re.match(r"ram://(\?|$)", config.device):
        named = config.device.replace("ram://", "ram://kv", 1)
        raise ConfigError(
            f"device: {config.device} has no name, so what format writes is gone before it is "
            f"opened: name it, as in {named}"
        )
    if 0 < config.pool_size < _budgets(config):
        _LOG.warning(
            "pool_size %s is raised to %s, which memory_budget %s and swap_buffer_size %s need: "
            "lower those, or leave pool_size out",
            format_size(config.pool_size),
            format_size(_budgets(config)),
            format_size(config.memory_budget),
            format_size(config.swap_buffer_size),
        )
    if config.format == "always":
        return _open_new(config, bar, force=True)
    try:
        return _open(config, bar)
    except FormatError:
        if config.format != "if_missing":
            raise
    except ConfigError as error:
        # What is not there yet is as empty as a device can be.
        if config.format != "if_missing" or error.code != -errno.ENOENT:
            raise
    return _open_new(config, bar, force=False)


def _open_new(config: Config, bar: BarProvider | None, *, force: bool) -> Namespace:
    """Formats, then opens. A file that was made for that goes again if it cannot be opened."""
    path = _missing_file(config.device)
    _format(config, force=force)
    try:
        return _open(config, bar)
    except DeviceBusy:  # somebody else was faster and has it now
        raise
    except BaseException:
        if path is not None:
            path.unlink(missing_ok=True)
        raise


def _missing_file(device: str) -> Path | None:
    """Where format will make a file, if the device is one that is not there."""
    if not device.startswith("file://"):
        return None
    path = Path(unquote(device.removeprefix("file://").partition("?")[0]))
    return None if path.exists() else path


def _budgets(config: Config) -> int:
    """Bytes of the pool that the engine itself may take."""
    return config.memory_budget + config.swap_buffer_size + gate_bytes(config)


def _format(config: Config, force: bool) -> None:
    Namespace.format(
        config.device, segment_size=config.segment_size, label=config.label, force=force
    )


def _open(config: Config, bar: BarProvider | None) -> Namespace:
    namespace = Namespace.open(
        config.device,
        read_only=config.read_only,
        drive=config.drive,
        pool_size=max(config.pool_size, _budgets(config)),
        queue_depth=config.queue_depth,
        requests_max=config.requests_max,
        batch_inflight=config.batch_inflight,
        batch_size_max=config.batch_size_max,
        index_entries_max=config.index_entries_max,
        admission=config.admission,
        reinsert_percent=config.reinsert_percent,
        write_budget_per_day=config.write_budget_per_day,
        command_timeout_ms=config.command_timeout_ms,
        spin_us=config.spin_us,
        owner_socket=config.owner_socket,
        staging=config.staging,
        staging_size=config.swap_buffer_size,
        bar=bar,
    )
    namespace.reopen_by("make a new hifc.HiFC with the same configuration")
    return namespace
