# SPDX-License-Identifier: Apache-2.0
"""The backends that tests of kernels run on: the host, the host with threads and blocks backwards,
and a GPU where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hifc.errors import NotSupported
from hifc.kernels import backend as kernels


def make_backend(name: str) -> kernels.Backend:
    """Skips where the machine has no such backend."""
    if name == "backwards":
        return kernels.HostBackend("a test", backwards=True)
    try:
        return kernels.backend(name)
    except NotSupported as error:
        pytest.skip(str(error))


NAMES = ["host", "backwards", "cuda"]


def to(where: kernels.Backend, array: Any) -> Any:
    """A copy of a numpy array in the memory of a backend, at a multiple of 16 at least."""
    if where.name == "cuda":
        return where.xp.asarray(array)
    room = np.empty(array.nbytes + 15, np.uint8)
    start = -room.ctypes.data % 16
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def back(array: Any) -> Any:
    """The same as a numpy array."""
    return array if isinstance(array, np.ndarray) else array.get()
