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
}
