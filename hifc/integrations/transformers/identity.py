# SPDX-License-Identifier: Apache-2.0
"""Which model it is: what tells its KV from that of any other, in keys and in measurements."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hifc.errors import ConfigError

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def plain(value: Any) -> Any:
    """JSON's view of it, so that it can go into a key."""
    return json.loads(json.dumps(value, sort_keys=True, default=str))


def fingerprint(config: Any) -> str:
    """A digest of the model's configuration, its name and place left out."""
    settings = plain(config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identity_of(model_id: str | None, config: Any) -> tuple[str, str]:
    """(model, revision) for block keys: two models that differ in weights differ here.

    A commit of the hub or the weight files of a local folder name the weights; where neither is
    known, model_id must be given. The configuration is part of it in any case.
    """
    shape = fingerprint(config)
    if model_id is not None:
        return model_id, shape
    name = getattr(config, "_name_or_path", "") or ""
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return name, f"{commit} {shape}"
    folder = Path(name)
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern)) if name else []
    if not files:
        raise ConfigError(
            f"the weights of this model ({name or 'made from a configuration'}) have no name that "
            "tells them from others: give model_id=..., and another one whenever they change"
        )
    marks = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    digest = hashlib.blake2b(json.dumps(marks).encode(), digest_size=16).hexdigest()
    return "files", f"{digest} {shape}"
