"""What a user must know about a model before the first answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from conure.engine.protocol import ModelPurpose

SUGGESTED_MODEL: Final = "Qwen/Qwen2.5-0.5B-Instruct"
"""A general model without conditions that runs on a CPU."""

_GENERAL: Final = f"`conure serve {SUGGESTED_MODEL}` serves a general model."

NOTICES: Final[Mapping[ModelPurpose, str]] = {
    "general": "",
    "demonstration": "This small model answers questions about short reports and nothing else; it "
    f"is not trained to call tools. {_GENERAL}",
    "test": f"Its answers have no meaning: it is for tests; {_GENERAL}",
}
"""The notice of a model, by its purpose."""

NO_CHAT_TEMPLATE: Final = (
    "The model has no chat template: `conure chat` and calls with messages are refused, calls with "
    "`prompt` work."
)
"""The notice of a model without a chat template."""

UNTRAINED_TOOLS: Final = (
    "a call offers tools, which this model is not trained to call: its choice of tool and "
    f"arguments has no meaning. {_GENERAL}"
)
"""What the server logs once if a call offers tools to the built-in model."""
