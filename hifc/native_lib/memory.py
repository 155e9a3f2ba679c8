# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a caller's buffer are: numpy, torch on the CPU, anything with the buffer
protocol.

Only whole contiguous memory is accepted, since it is handed to a device as one range. Torch is
never imported: a tensor is recognised by its `data_ptr`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hifc.errors import InvalidRequest

Buffer: TypeAlias = Any  # bytes, bytearray, memoryview, numpy array, torch CPU tensor
ByteArray: TypeAlias = npt.NDArray[np.uint8]


class Span:
    """A range of memory as numpy sees it; arrays made from it keep it alive, and with it owner."""

    __slots__ = ("__array_interface__", "__weakref__", "owner")

    def __init__(
        self, address: int, size_bytes: int, owner: object, readonly: bool = False
    ) -> None:
        self.owner = owner
        self.lie_at(address, size_bytes, readonly)

    def lie_at(self, address: int, size_bytes: int, readonly: bool = False) -> None:
        """Says where the range is, before an array is made of it."""
        self.__array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, readonly),
            "version": 3,
        }

    def array(self) -> ByteArray:
        """uint8 array over the range, without a copy."""
        return np.asarray(self)


@dataclass(slots=True, frozen=True)
class Memory:
    """size_bytes of memory at address, valid as long as owner lives."""

    address: int
    size_bytes: int
    readonly: bool
    owner: object

    def array(self, size_bytes: int) -> ByteArray:
        """uint8 array over the first size_bytes, without a copy."""
        return Span(self.address, size_bytes, self.owner, self.readonly).array()


def copy_memory(destination: int, source: int, size_bytes: int) -> None:
    """Copies between addresses; the GIL is released."""
    ctypes.memmove(destination, source, size_bytes)


def memory_of(data: Buffer) -> Memory:
    """The memory of a buffer. InvalidRequest: not contiguous, not in CPU memory, or no buffer."""
    if isinstance(data, np.ndarray):
        return _of_array(data)
    if hasattr(data, "data_ptr") and hasattr(data, "element_size"):
        return _of_tensor(data)
    try:
        view = memoryview(data)
    except TypeError:
        raise InvalidRequest(
            f"{type(data).__name__} is no buffer: give bytes, a numpy array or a torch tensor"
        ) from None
    if not view.c_contiguous:
        raise InvalidRequest("the memoryview is strided: copy it with bytes(...) first")
    if view.nbytes == 0:
        return Memory(0, 0, view.readonly, data)
    array = np.frombuffer(view, dtype=np.uint8)
    return Memory(array.__array_interface__["data"][0], view.nbytes, view.readonly, array)


def _of_array(data: npt.NDArray[Any]) -> Memory:
    flags = data.flags
    if not flags.c_contiguous:
        raise InvalidRequest(
            f"the array of shape {data.shape} is strided: pass np.ascontiguousarray(...) of it"
        )
    if data.dtype.hasobject:
        raise InvalidRequest(f"an array of {data.dtype} holds Python objects, not bytes")
    address = data.__array_interface__["data"][0]
    return Memory(address, data.nbytes, not flags.writeable, data)


def _of_tensor(data: Any) -> Memory:
    if data.device.type != "cpu":
        raise InvalidRequest(
            f"the tensor is on {data.device}: copy it to the CPU, best into ns.buffer(...)"
        )
    if str(data.layout) != "torch.strided":
        raise InvalidRequest(f"the tensor's layout is {data.layout}: pass tensor.to_dense()")
    if data.is_conj() or data.is_neg():
        raise InvalidRequest(
            "the tensor's bytes are not its values yet, it is conjugated or negated when it is "
            "read: pass tensor.resolve_conj().resolve_neg()"
        )
    if not data.is_contiguous():
        raise InvalidRequest(
            f"the tensor of shape {tuple(data.shape)} is strided: pass tensor.contiguous()"
        )
    size_bytes = data.numel() * data.element_size()
    if size_bytes and data.data_ptr() == 0:
        raise InvalidRequest("the tensor has no memory of its own: pass tensor.clone()")
    return Memory(data.data_ptr(), size_bytes, False, data)
