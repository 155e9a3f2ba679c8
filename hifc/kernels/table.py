# SPDX-License-Identifier: Apache-2.0
"""Every kernel of native/: its source, the threads of its blocks, and its struct as in C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Kernel:
    """source: file in native/; threads: of a block; args: the struct, with the names as in C."""

    source: str
    threads: int
    args: np.dtype[Any]


def _args(pointers: str, **others: str) -> np.dtype[Any]:
    """Names by type, in the order of the struct: first the pointers, then the types as given."""
    fields = [(name, "<u8") for name in pointers.split()]
    for kind, names in others.items():
        fields += [(name, f"<{kind}") for name in names.split()]
    return np.dtype(fields, align=True)


# struct Divider of portable.cuh
DIVIDER = np.dtype([(name, "<u4") for name in ("divisor", "magic", "shift_once", "shift_rest")])


def divider(divisor: int) -> tuple[int, int, int, int]:
    """The fields of a DIVIDER, for divisors from 1 to 2**32 - 1."""
    bits = (divisor - 1).bit_length()
    magic = (1 << 32) * ((1 << bits) - divisor) // divisor + 1
    return divisor, magic, min(bits, 1), max(bits - 1, 0)


PACK_BLOCKS_MAX = 32
_PACK = np.dtype(
    [
        ("packed", "<u8", (PACK_BLOCKS_MAX,)),
        *((name, "<u8") for name in ("planes", "pages", "scales", "checksums", "faults")),
        ("cache_tokens", "<u8"),
        *((f"{name}_stride", "<i8") for name in ("page", "token", "head", "item")),
        *((name, DIVIDER) for name in ("row", "tokens", "heads", "page_tokens")),
        *((name, "<u4") for name in ("blocks", "block_pages", "plane_count", "item_bytes")),
        *((name, "<u4") for name in ("access_bytes", "packed_aligned", "kind", "coded")),
        *((name, "<u4") for name in ("part_bytes", "parts", "chunk_rows", "chunks")),
    ],
    align=True,
)
_PACKING = ("rows", "rows_crc", "bytes", "converted", "items")

_HEAT = _args(
    "heat mass eligible state ranges hot victims counts",
    f8="hot_ratio",
    u4="count range_blocks victims_max",
    f4="decay threshold",
)
_LITMUS = _args("slots statuses head tail results", u4="slot_count status_count wanted")
_VICTIMS = _args("heat victims counts head chain depth orders ordered", u4="victims_max blocks")

KERNELS: dict[str, Kernel] = {
    "hifc_checksum": Kernel(
        "checksum.cu",
        256,
        _args(
            "data checksums",
            u8="part_stride_bytes",
            u4="part_bytes parts chunk_rows chunks",
        ),
    ),
    **{f"hifc_pack_{way}": Kernel("pack.cu", 256, _PACK) for way in _PACKING},
    **{f"hifc_unpack_{way}": Kernel("pack.cu", 256, _PACK) for way in _PACKING},
    "hifc_scales": Kernel("scales.cu", 256, _PACK),
    "hifc_sketch_append": Kernel(
        "sketch.cu",
        128,
        _args(
            "keys codes params",
            i8="head_stride token_stride",
            u4="type dim tokens start capacity",
        ),
    ),
    "hifc_sketch_scores": Kernel(
        "sketch.cu",
        256,
        _args(
            "queries codes params scores",
            i8="query_stride head_stride",
            u4="type dim count heads kv_heads capacity length block_tokens",
            f4="scale",
        ),
    ),
    "hifc_digest_append": Kernel(
        "digest.cu",
        256,
        _args(
            "keys digests",
            i8="head_stride token_stride",
            u4="type dim tokens start capacity block_tokens",
        ),
    ),
    "hifc_digest_scores": Kernel(
        "digest.cu",
        256,
        _args(
            "queries digests scores",
            i8="query_stride head_stride",
            u4="query_type digest_type dim count heads kv_heads capacity length block_tokens",
            f4="scale",
        ),
    ),
    "hifc_weights_mass": Kernel(
        "mass.cu",
        256,
        _args(
            "weights mass",
            i8="batch_stride head_stride query_stride mass_stride",
            u4="type batch heads queries keys block_tokens blocks_of_tile",
            f4="scale",
        ),
    ),
    "hifc_softmax_mass": Kernel(
        "mass.cu", 256, _args("scores mass", u4="heads kv_heads token_blocks cells_of_block")
    ),
    "hifc_heat_update": Kernel("heat.cu", 512, _HEAT),
    "hifc_heat_middle": Kernel("heat.cu", 512, _HEAT),
    "hifc_heat_low": Kernel("heat.cu", 512, _HEAT),
    "hifc_heat_split": Kernel("heat.cu", 512, _HEAT),
    "hifc_trend_scores": Kernel(
        "trend.cu",
        256,
        _args("history scores", u4="window first steps heads heads_of_row capacity token_blocks"),
    ),
    "hifc_trend_candidates": Kernel(
        "trend.cu",
        512,
        _args(
            "scores resident in_flight candidates counts skipped",
            u4="token_blocks words degree",
            f4="score_min",
        ),
    ),
    "hifc_prefetch_issue": Kernel(
        "issue.cu",
        256,
        _args(
            "candidates counts keys in_flight owners free_landings slots statuses head tail "
            "overflowed totals",
            u4="rows degree words key_row_stride landings landing_pages slot_count part_first "
            "part_step part_count shares_ring",
        ),
    ),
    "hifc_prefetch_settle": Kernel(
        "issue.cu",
        256,
        _args("in_flight owners statuses landed items counts totals", u4="landings"),
    ),
    "hifc_prefetch_release": Kernel(
        "issue.cu",
        256,
        _args("released in_flight resident owners statuses", u4="count landings"),
    ),
    "hifc_litmus_produce": Kernel("litmus.cu", 256, _LITMUS),
    "hifc_litmus_consume": Kernel("litmus.cu", 256, _LITMUS),
    "hifc_victims_group": Kernel("victims.cu", 128, _VICTIMS),
    "hifc_victims_order": Kernel("victims.cu", 128, _VICTIMS),
}
