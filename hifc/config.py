# SPDX-License-Identifier: Apache-2.0
"""One frozen configuration: a table of settings, each with its check, its default and its meaning.

Built from keywords, a mapping or YAML; unknown keys are refused with the nearest known one, and a
value of the wrong kind with what is allowed. Sizes take a count of bytes or a text such as 64MiB.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import yaml

from hifc.device.device import device_uri
from hifc.errors import ConfigError
from hifc.stream.plan import RESIDENT_RATIO
from hifc.util.checking import text
from hifc.util.units import format_size, parse_size


@dataclass(frozen=True)
class _Kind:
    """What a setting may be: in words, and the function that checks and converts it."""

    allowed: str
    check: Callable[[str, object], Any]


@dataclass(frozen=True)
class Setting:
    """One setting, in words."""

    name: str
    default: str  # as in YAML
    allowed: str
    meaning: str


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    hint = " (without quotes)" if isinstance(value, str) else ""
    raise ConfigError(f"{name}: {value!r} is no boolean; write true or false{hint}")


def _text(name: str, value: object) -> str:
    if value is not None and not isinstance(value, str | list | dict | set | bytes):
        kind = "a number" if type(value) in (int, float) else f"a {type(value).__name__}"
        raise ConfigError(
            f"{name}: {value!r} is {kind}, not a text: write it in quotes, in YAML as well, as in "
            f'{name}: "{value}" (without them YAML changes it: 010 becomes 8)'
        )
    return text(name, value)


def _device(name: str, value: object) -> str:
    if isinstance(value, os.PathLike):
        return device_uri(value)
    written = _text(name, value)
    return device_uri(written) if written else ""


def _hex(name: str, value: object) -> str:
    written = _text(name, value)
    try:
        length = len(bytes.fromhex(written))
    except ValueError:
        raise ConfigError(f"{name}: {written!r} is not hexadecimal") from None
    if length > 64:
        raise ConfigError(f"{name}: {length} bytes, at most 64 fit")
    return written


_BOOLEAN = _Kind("true, false", _boolean)
_TEXT = _Kind("a text", _text)
_DEVICE = _Kind("a URI or a path", _device)
_HEX = _Kind("up to 64 bytes in hexadecimal", _hex)
_SIZE = _Kind("a size", lambda name, value: parse_size(value, name))


def _count(least: int, most: int) -> _Kind:
    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"{name}: {value!r} is no whole number from {least} to {most}")
        return value

    return _Kind(f"{least} to {most}", check)


def _number(least: float, most: float) -> _Kind:
    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name}: {value!r} is no number from {least} to {most}")
        if not least <= value <= most:
            raise ConfigError(f"{name}: {value!r} is not from {least} to {most}")
        return float(value)

    return _Kind(f"{least} to {most}", check)


def _choice(*allowed: str) -> _Kind:
    def check(name: str, value: object) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        off = " (YAML reads a bare off or no as false: quote it)" if value is False else ""
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(allowed)}{off}")

    return _Kind(", ".join(allowed), check)


def _setting(default: Any, kind: _Kind, meaning: str, *, key: str = "") -> Any:
    metadata = {"kind": kind, "meaning": meaning, "key": key}
    return dataclasses.field(default=default, metadata=metadata)


MiB = 1 << 20
_ADMISSIONS = _choice("always", "second_use", "budget")
_ALGORITHMS = _choice("zlib", "zstd", "lz4")
_POLICIES = _choice("default", "return_time", "frequency", "lru", "lfu", "arc", "s3fifo")
_SHARE = _number(0.0, 1.0)


# The settings of Config as a mapping, for type checkers, which then see a name or a value that does
# not exist. In this form since `lambda` is a word of Python's. A test compares it with Config.
ConfigDict = TypedDict(
    "ConfigDict",
    {
        "device": str,
        "format": Literal["never", "if_missing", "always"],
        "segment_size": int | str,
        "label": str,
        "read_only": bool,
        "drive": Literal["reactor", "inline"],
        "pool_size": int | str,
        "queue_depth": int,
        "requests_max": int,
        "batch_inflight": int,
        "batch_size_max": int | str,
        "index_entries_max": int,
        "command_timeout_ms": int,
        "spin_us": int,
        "owner_socket": bool,
        "admission": Literal["always", "second_use", "budget"],
        "write_budget_per_day": int | str,
        "reinsert_percent": int,
        "enable_compression": bool,
        "compression_algorithm": Literal["zlib", "zstd", "lz4"],
        "compression_level": int,
        "memory_budget": int | str,
        "memory_reserved": int | str,
        "host_tier_bytes": int | str,
        "hot_ratio": float,
        "hot_ratio_min": float,
        "hot_ratio_max": float,
        "hit_rate_target": float,
        "watermark": float,
        "policy": Literal["default", "return_time", "frequency", "lru", "lfu", "arc", "s3fifo"],
        "lambda": float,
        "swap_batch_size": int,
        "swap_buffer_size": int | str,
        "prefetch_degree": int,
        "prefetch_window": int,
        "staging": Literal["auto", "gpu", "pinned", "host"],
        "block_tokens": int,
        "resident_ratio": float,
        "staging_layers": int,
        "save_prefix": bool,
        "load_or_recompute": Literal["auto", "load", "recompute"],
        "salt": str,
        "attention": Literal["exact", "sparse"],
        "sparse_block_tokens": int,
        "sparse_sink_tokens": int,
        "sparse_recent_tokens": int,
        "sparse_sketch": Literal["4bit", "digest"],
        "sparse_missed_max": float,
        "sparse_resident_max": float,
        "sparse_prefetch_degree": int,
        "sparse_check_every": int,
    },
    total=False,
)
ConfigDict.__doc__ = """The settings of Config as a mapping: what HiFC and Config.load take."""


@dataclass(frozen=True)
class Config:
    """Settings of HiFC. `Config.load` takes a Config, a mapping or the path of a YAML file."""

    # ---- device and namespace
    device: str = _setting(
        "",
        _DEVICE,
        "URI or path of the device, such as file:///var/lib/hifc/kv?size=8GiB or /dev/nvme0n1.",
    )
    format: str = _setting(
        "never",
        _choice("never", "if_missing", "always"),
        "Whether opening formats the device. `always` does so at each start, and what was "
        "on it is lost.",
    )
    segment_size: int = _setting(
        0,
        _SIZE,
        "Segment size for formatting: a power of two from 256KiB to 256MiB. 0 chooses it "
        "by the size of the device.",
    )
    label: str = _setting("", _TEXT, "Label for formatting, shown by `hifc-admin info`.")
    read_only: bool = _setting(False, _BOOLEAN, "Nothing on the device is changed.")
    drive: str = _setting(
        "reactor",
        _choice("reactor", "inline"),
        "Who polls the device: `reactor` is a thread of its own, `inline` is whichever "
        "thread waits.",
    )
    pool_size: int = _setting(
        0,
        _SIZE,
        "Size of the buffer pool in locked memory. It is raised to what the budgets below need.",
    )
    queue_depth: int = _setting(
        128, _count(1, 4096), "Largest number of commands in flight on each queue pair."
    )
    requests_max: int = _setting(8192, _count(1, 1 << 20), "Largest number of requests in flight.")
    batch_inflight: int = _setting(
        4,
        _count(1, 32),
        "Number of batches being written from which on new values wait and are written together.",
    )
    batch_size_max: int = _setting(8 * MiB, _SIZE, "Largest size of one batch.")
    index_entries_max: int = _setting(
        0,
        _count(0, 1 << 34),
        "Largest number of stored values that the index has room for. 0 chooses it by capacity.",
    )
    command_timeout_ms: int = _setting(
        30000, _count(1, 3_600_000), "Time after which a command of the device counts as lost."
    )
    spin_us: int = _setting(
        50,
        _count(0, 1_000_000),
        "How long the reactor busy-polls without work before it sleeps.",
    )
    owner_socket: bool = _setting(
        True,
        _BOOLEAN,
        "Whether `hifc-admin top`, `stats` and `smart` are answered while the device is open.",
    )
    # ---- what is written
    admission: str = _setting(
        "always", _ADMISSIONS, "Which values of class reuse are written at all."
    )
    write_budget_per_day: int = _setting(
        0, _SIZE, "Bytes that `admission: budget` may write in a day. That rule needs one."
    )
    reinsert_percent: int = _setting(
        5,
        _count(0, 100),
        "Share of the accepted bytes that reclaim may write again to keep values in use.",
    )
    enable_compression: bool = _setting(
        False, _BOOLEAN, "Whether blocks that `HiFC` stores are compressed."
    )
    compression_algorithm: str = _setting(
        "zlib", _ALGORITHMS, "Compression algorithm used when `enable_compression` is true."
    )
    compression_level: int = _setting(
        1, _count(0, 22), "Compression level of zlib (up to 9) or zstd."
    )
    # ---- what stays in memory
    memory_budget: int = _setting(256 * MiB, _SIZE, "Memory for resident blocks.")
    memory_reserved: int = _setting(0, _SIZE, "Part of the memory budget that stays free.")
    host_tier_bytes: int = _setting(
        0,
        _SIZE,
        "Size of a tier in ordinary memory that blocks go to before flash. 0 means that "
        "there is none.",
    )
    hot_ratio: float = _setting(
        0.30,
        _SHARE,
        "Share of the blocks that is hot at first, before the hot-ratio controller changes it.",
    )
    hot_ratio_min: float = _setting(
        0.05, _SHARE, "Lowest hot ratio that the controller may choose."
    )
    hot_ratio_max: float = _setting(
        0.95, _SHARE, "Highest hot ratio that the controller may choose."
    )
    hit_rate_target: float = _setting(
        0.90, _SHARE, "Hit rate that the hot-ratio controller tries to reach."
    )
    watermark: float = _setting(
        0.15,
        _SHARE,
        "Blocks leave memory once less than this share of the usable memory budget is free.",
    )
    policy: str = _setting(
        "default", _POLICIES, "Policy that decides which blocks leave memory first."
    )
    decay_lambda: float = _setting(
        0.1, _number(0.0, 1e6), "Decay of heat and of `policy: frequency`, in 1/s.", key="lambda"
    )
    # ---- how it moves
    swap_batch_size: int = _setting(
        8, _count(1, 1024), "Number of blocks that leave or enter memory together."
    )
    swap_buffer_size: int = _setting(
        32 * MiB,
        _SIZE,
        "Pool memory for prefetches, and as much again for blocks that leave the host "
        "tier, which holds no larger block. With `staging: gpu` it is memory of the GPU.",
    )
    prefetch_degree: int = _setting(
        2, _count(0, 1024), "Number of blocks that are prefetched ahead. 0 turns prefetching off."
    )
    prefetch_window: int = _setting(
        3, _count(2, 64), "Number of steps that the trend of attention looks at."
    )
    staging: str = _setting(
        "auto",
        _choice("auto", "gpu", "pinned", "host"),
        "Memory in which bytes wait between flash and attention. `auto` takes the best "
        "that is there.",
    )
    # ---- blocks and models
    block_tokens: int = _setting(
        0,
        _count(0, 65536),
        "Transformers: tokens of a block. 0 means 256, or fewer where resident_ratio asks "
        "for it. Prefixes are found only with the same value.",
    )
    resident_ratio: float = _setting(
        RESIDENT_RATIO,
        _SHARE,
        "Transformers: share of all KV that is in memory at a time. It must be more than 0.",
    )
    staging_layers: int = _setting(
        2, _count(2, 64), "Transformers: number of layers that rotate through memory."
    )
    save_prefix: bool = _setting(
        False, _BOOLEAN, "Transformers: whether the KV of prompts is kept for later runs."
    )
    load_or_recompute: str = _setting(
        "auto",
        _choice("auto", "load", "recompute"),
        "Whether a stored prefix is loaded or computed again. `auto` takes what is "
        "measured to be faster.",
    )
    salt: str = _setting(
        "",
        _HEX,
        "Transformers: salt of the keys of this tenant. Tenants with another salt do not "
        "find them.",
    )
    attention: str = _setting(
        "exact",
        _choice("exact", "sparse"),
        "Transformers: whether attention sees all blocks, or those that matter to the query.",
    )
    # ---- sparse attention: see SparseSettings of hifc/sparse/plan.py
    sparse_block_tokens: int = _setting(
        0,
        _count(0, 65536),
        "Tokens of a block in sparse attention. 0 takes the shortest that suits the device.",
    )
    sparse_sink_tokens: int = _setting(
        16, _count(0, 65536), "Number of first tokens that sparse attention always sees."
    )
    sparse_recent_tokens: int = _setting(
        32, _count(0, 65536), "Number of last tokens that sparse attention always sees."
    )
    sparse_sketch: str = _setting(
        "4bit",
        _choice("4bit", "digest"),
        "Sketch of the keys that blocks are chosen by. `digest` is smaller and much less accurate.",
    )
    sparse_missed_max: float = _setting(
        0.1,
        _SHARE,
        "Share of the attention that may be missed. Where more is missed, more blocks "
        "stay in memory.",
    )
    sparse_resident_max: float = _setting(
        0.5,
        _SHARE,
        "Largest share of all KV that sparse attention may keep in memory. Where that is "
        "not enough, it becomes exact.",
    )
    sparse_prefetch_degree: int = _setting(
        0,
        _count(0, 65536),
        "Number of blocks of each head that are prefetched by the trend. 0 turns it off.",
    )
    sparse_check_every: int = _setting(
        16,
        _count(0, 1 << 20),
        "Number of steps between two comparisons with exact attention. 0 means never.",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = field.metadata["kind"].check(_key(field), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        self._relations()

    def _relations(self) -> None:
        if not self.hot_ratio_min <= self.hot_ratio <= self.hot_ratio_max:
            raise ConfigError(
                f"hot_ratio: {self.hot_ratio} is not between hot_ratio_min {self.hot_ratio_min} "
                f"and hot_ratio_max {self.hot_ratio_max}"
            )
        if self.memory_reserved >= self.memory_budget:
            raise ConfigError(
                f"memory_reserved: {format_size(self.memory_reserved)} leaves nothing of "
                f"memory_budget {format_size(self.memory_budget)}"
            )
        if self.host_tier_bytes and not self.swap_buffer_size:
            raise ConfigError("swap_buffer_size: blocks leave the host tier through one; give it")
        if self.admission == "budget" and self.write_budget_per_day == 0:
            raise ConfigError("write_budget_per_day: admission budget needs one, e.g. 500GiB")
        if self.attention == "sparse" and self.sparse_resident_max < self.resident_ratio:
            raise ConfigError(
                f"sparse_resident_max: {self.sparse_resident_max} is less than resident_ratio "
                f"{self.resident_ratio}, from where it widens"
            )
        if self.segment_size and self.segment_size & (self.segment_size - 1):
            raise ConfigError(
                f"segment_size: {self.segment_size} is no power of two from 256KiB to 256MiB"
            )

    # ---- in

    @classmethod
    def load(
        cls,
        source: Config | ConfigDict | str | Path | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Config:
        """A Config as it is, a mapping, the path of a YAML file, or None for all defaults.

        changes: settings by name that take the place of those of source. Type checkers want a
        ConfigDict; a mapping whose names are known at run time alone goes through from_mapping.
        """
        changes = changes or {}
        if source is None:
            return cls.from_mapping(changes)
        if isinstance(source, Mapping):
            return cls.from_mapping({**source, **changes})
        if isinstance(source, str) and "://" in source:
            raise ConfigError(
                f"{source!r} is a device, not the path of a configuration: give device={source!r}"
            )
        if isinstance(source, str | Path):
            source = cls.from_file(source)
        if isinstance(source, Config):
            return cls.from_mapping({**source.to_mapping(), **changes}) if changes else source
        raise ConfigError(
            f"a configuration is a mapping or the path of a YAML file, not {type(source).__name__}"
        )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Config:
        """From settings by name. ConfigError: an unknown name or a bad value."""
        names = {_key(field): field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in names:
                near = difflib.get_close_matches(str(name), names, 1, 0.5)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
                raise ConfigError(f"unknown setting {name!r}; {hint}")
            values[names[name]] = value
        return cls(**values)

    @classmethod
    def from_yaml(cls, text: str, where: str = "configuration") -> Config:
        """From the text of a YAML mapping; an empty text is all defaults."""
        try:
            settings = yaml.load(text, Loader=_StrictLoader)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        # Scalars with a wrong tag, and nesting without end, are no YAMLError to the library.
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not YAML: {error}") from error
        if settings is None:
            settings = {}
        if not isinstance(settings, dict):
            raise ConfigError(f"{where}: a mapping of settings is wanted, e.g. `pool_size: 64MiB`")
        try:
            return cls.from_mapping(settings)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """From a YAML file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:  # no UTF-8, or no path
            raise ConfigError(f"{str(path)!r}: cannot be read: {error}") from error
        return cls.from_yaml(text, str(path))

    # ---- out

    def to_mapping(self) -> dict[str, Any]:
        """All settings by name; sizes as texts."""
        return {
            _key(field): format_size(value) if field.metadata["kind"] is _SIZE else value
            for field in dataclasses.fields(self)
            for value in (getattr(self, field.name),)
        }

    def to_yaml(self) -> str:
        """A YAML text that from_yaml reads back to an equal configuration."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False)

    @classmethod
    def settings(cls) -> list[Setting]:
        """All of them in words: docs/settings.md."""
        defaults = cls().to_mapping()
        fields = {_key(field): field.metadata for field in dataclasses.fields(cls)}
        return [
            Setting(name, json.dumps(defaults[name]), data["kind"].allowed, data["meaning"])
            for name, data in fields.items()
        ]

    def replace(self, **changes: Any) -> Config:
        """A copy with some settings changed, checked again."""
        return dataclasses.replace(self, **changes)


def _key(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata["key"] or field.name)


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which YAML would silently overwrite."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    pairs = loader.construct_pairs(node, deep=True)
    result: dict[Any, Any] = {}
    for name, value in pairs:
        if not isinstance(name, str):
            raise ConfigError(f"a setting is named by a text, not {name!r}")
        if name in result:
            raise ConfigError(f"setting {name!r} is given twice")
        result[name] = value
    return result


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
