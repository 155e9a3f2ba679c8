# SPDX-License-Identifier: Apache-2.0
"""The verbs on a running engine: stats."""

from __future__ import annotations

from hifc_admin.parsing import Verbs


def register(verbs: Verbs) -> None:
    """Nothing yet."""
