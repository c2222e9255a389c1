"""Models that transformers loads: code that a folder offers is not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conure.engine.models import registry
from conure.engine.protocol import EngineError

from .. import shrunk


def offer_code(folder: Path, **changes: str) -> Path:
    """Add code for every class to a folder; return the file that the code creates."""
    marker = folder / "executed"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w').close()")
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {name: f"own.{name}" for name in classes}, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Slow", "own.Fast"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return marker


@pytest.mark.parametrize("is_dummy", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_code_of_a_known_model_is_not_run(family: str, is_dummy: bool, tmp_path: Path) -> None:
    marker = offer_code(shrunk.write(tmp_path, family))
    name = str(tmp_path)
    source = registry.find(name, is_dummy=is_dummy)
    config = registry.read_config(source, is_dummy=is_dummy)
    loaded = registry.load(name, source, config, "float32", "cpu", is_dummy=is_dummy)
    assert loaded.description.lower().startswith(family)
    assert not marker.exists()


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_model_that_only_its_own_code_knows_is_refused(is_dummy: bool, tmp_path: Path) -> None:
    marker = offer_code(shrunk.write(tmp_path, "llama"), model_type="own")
    source = registry.find(str(tmp_path), is_dummy=is_dummy)
    with pytest.raises(EngineError) as refused:
        registry.read_config(source, is_dummy=is_dummy)
    assert refused.value.code == "model.unsupported"
    assert refused.value.message == (
        f"transformers has no model type 'own', and the code that {tmp_path} offers for it "
        "(auto_map) is never run"
    )
    assert not marker.exists()
