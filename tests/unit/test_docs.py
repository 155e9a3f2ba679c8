# SPDX-License-Identifier: Apache-2.0
"""The Python of the documentation runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks() -> list[tuple[str, str]]:
    """(where, source) of every block marked as Python."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            found.append((f"{path.relative_to(ROOT)}:{line}", match[1]))
    return found


def make_model(folder: Path) -> None:
    """A small model with random weights and a tokenizer of bytes, as a checkpoint."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytewise = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, [])
    )
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize(("where", "source"), blocks(), ids=[where for where, _ in blocks()])
def test_python_in_the_documentation(where: str, source: str, tmp_path: Path) -> None:
    source = source.replace("/var/tmp/", f"{tmp_path}/").replace("8GiB", "256MiB")
    if "path/of/a/model" in source:
        make_model(tmp_path / "model")
        (tmp_path / "long.txt").write_text("A long text, as texts go. " * 40)
        source = source.replace("path/of/a/model", f"{tmp_path}/model")
        source = source.replace("long.txt", f"{tmp_path}/long.txt")
    exec(compile(source, where, "exec"), {"__name__": "__main__"})


def test_links_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert "://" in link or (path.parent / link).exists(), f"{path}: {link}"
