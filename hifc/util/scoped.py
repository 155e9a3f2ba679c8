# SPDX-License-Identifier: Apache-2.0
"""Scoped: a mixin for what has an end, so that `with x:` ends it (a namespace, a ring, ...)."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import NoReturn, Self

from hifc.errors import NotSupported


class Scoped(abc.ABC):
    """`with thing:` ends it, whether or not its block raised."""

    __slots__ = ()

    @abc.abstractmethod
    def _end(self) -> None:
        """What leaving the block does."""

    def __reduce__(self) -> NoReturn:
        """For copy and pickle: a copy would end what the first one still uses."""
        raise NotSupported(
            f"a {type(self).__name__} can be neither copied nor pickled: pass it on as it is, or "
            "open the device where it is to be used"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
