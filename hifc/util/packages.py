# SPDX-License-Identifier: Apache-2.0
"""Optional packages: what needs one asks here, and the error names the extra that brings it."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

from hifc.errors import MissingPackage

# The least release that works, as pyproject.toml has it.
LEAST = {"torch": (2, 4), "transformers": (5, 14)}

_CPU_TORCH = (
    " (HiFC runs models on the CPU: install PyTorch's CPU build first, and pip does not fetch the "
    "one for CUDA, which brings gigabytes)"
)


def need(what: str, extra: str, *packages: str) -> None:
    """Imports packages for `what`, a noun. MissingPackage: one is not installed or too old."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise  # it is installed, and something that it imports is not
            raise MissingPackage(
                f"{what} needs {package}, which is not installed: `pip install 'hifc[{extra}]'`"
                + (_CPU_TORCH if package == "torch" else ""),
                package=package,
                extra=extra,
            ) from error
        if package in LEAST:
            _check_release(what, extra, package)


def _check_release(what: str, extra: str, package: str) -> None:
    least = LEAST[package]
    found = importlib.metadata.version(package)
    release = tuple(int(part) for part in re.findall(r"\d+", found)[: len(least)])
    if release < least:
        raise MissingPackage(
            f"{what} needs {package} {'.'.join(map(str, least))} or newer, {found} is installed: "
            f"`pip install 'hifc[{extra}]'`",
            package=package,
            extra=extra,
        )
