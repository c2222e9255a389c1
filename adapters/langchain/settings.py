"""What one call to the model asks for: from LangChain's arguments to a `generate` node.

Knows the arguments that chains bind and pass (sampling, tools, response formats), and the
fields of a node that they become. Refuses to know models, connections and messages.

Kept true: an argument is honoured, or known to mean nothing here, or refused by name;
equal calls give equal nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from langchain_core.utils.function_calling import convert_to_json_schema

from conure.server.program.ir import Constraint, Json, Sampling

if TYPE_CHECKING:
    from langchain_core.language_models import ModelProfile  # since core 1.1

MAX_ANSWERS: Final = 128
"""To one prompt, as OpenAI has it."""

_SAMPLING = frozenset(Sampling.__struct_fields__)
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_IDLE = frozenset({"model", "n", "stream", "ls_structured_output_format", "stream_usage"})
"""Arguments that are said elsewhere, or to tracers alone."""


def sampling_of(
    own: Mapping[str, Json], kwargs: Mapping[str, Any], *, stop: list[str] | None, strict: bool
) -> dict[str, Json]:
    """Sampling fields of one call: the call's own, over those of the model.

    Args:
        own: the model's.
        kwargs: arguments of the call.
        stop: the call's, if it has them as LangChain passes them.
        strict: refuse what is not known.

    Raises:
        ValueError: if `strict` and an argument of the call is not known.
    """
    settings = dict(own)
    for name, value in kwargs.items():
        if name in _SAMPLING:
            settings[name] = value
        elif name == "max_completion_tokens":
            settings["max_tokens"] = value
        elif strict and name not in _IDLE and value is not None and not _is_form(name):
            raise ValueError(f"ChatConure does not know the argument {name}={value!r}")
    if stop is not None:
        settings["stop"] = stop
    if isinstance(settings.get("stop"), str):
        settings["stop"] = [settings["stop"]]
    return {name: value for name, value in settings.items() if value not in (None, [])}


def _is_form(name: str) -> bool:
    return name in _TOOLS or name in ("response_format", "constraint")


def num_answers_of(own: int | None, kwargs: Mapping[str, Any]) -> int:
    """How many answers a call wants: its own `n`, over that of the model.

    Raises:
        ValueError: if that is no number of answers.
    """
    wanted = own if kwargs.get("n") is None else kwargs["n"]
    if wanted is None:
        return 1
    if not isinstance(wanted, int) or not 1 <= wanted <= MAX_ANSWERS:
        raise ValueError(f"n is a number of answers from 1 to {MAX_ANSWERS}; not {wanted!r}")
    return wanted


def tools_of(kwargs: Mapping[str, Any]) -> dict[str, Json]:
    """Fields of the node that say what functions the answer may ask for."""
    if not kwargs.get("tools"):
        return {}
    return {name: kwargs[name] for name in _TOOLS if kwargs.get(name) is not None}


def constraint_of(kwargs: Mapping[str, Any]) -> dict[str, Json]:
    """The field of the output that says what language the answer belongs to.

    Raises:
        ValueError: if it is said twice, or in a form that is not known.
    """
    wanted, form = kwargs.get("constraint"), kwargs.get("response_format")
    if wanted is not None and form is not None:
        raise ValueError("give either `constraint` or `response_format`")
    if wanted is not None:
        if not isinstance(wanted, Mapping) or len(wanted) != 1 or wanted.keys() - _KINDS:
            kinds = ", ".join(sorted(_KINDS))
            raise ValueError(f"a constraint is a dict with one of {kinds}; not {wanted!r}")
        return {"constraint": dict(wanted)}
    if form is None:
        return {}
    schema = _schema_of(form)
    return {} if schema is None else {"constraint": {"json_schema": schema}}


_KINDS = frozenset(Constraint.__struct_fields__)


def _schema_of(form: Any) -> dict[str, Json] | None:
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(form.get("json_schema"), Mapping):
        schema = form["json_schema"].get("schema")
        if isinstance(schema, Mapping):
            return dict(schema)
    elif kind is None:
        try:
            return convert_to_json_schema(cast(Any, form))
        except (TypeError, ValueError):
            pass
    raise ValueError(
        "response_format is {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
        f"{{'type': 'json_object'}} or a class with fields; not {form!r}"
    )


def choice_of(choice: Any, names: Sequence[str]) -> Json:
    """LangChain's words for a tool choice, in OpenAI's.

    Args:
        choice: `any`, `auto`, `none`, True, the name of a tool, or OpenAI's object.
        names: of the tools.

    Raises:
        ValueError: if it is none of these.
    """
    if choice is None or choice is False:
        return None
    if choice in ("any", "required") or choice is True:
        return "required"
    if choice in ("auto", "none") or isinstance(choice, Mapping):
        return choice
    if choice in names:
        return {"type": "function", "function": {"name": choice}}
    raise ValueError(f"tool_choice={choice!r} names none of the tools: {', '.join(names)}")


def default_profile() -> ModelProfile:
    """What every model of a Conure server can do; its context length is the server's to say."""
    return {
        "text_inputs": True,
        "text_outputs": True,
        "image_inputs": False,
        "audio_inputs": False,
        "video_inputs": False,
        "pdf_inputs": False,
        "tool_calling": True,
        "tool_choice": True,
        "structured_output": True,
    }


def hints_of(metadata: Mapping[str, Any], **ids: Any) -> dict[str, Json]:
    """What LangChain and LangGraph say of a call's place, for the node's `meta`.

    Args:
        metadata: of the run.
        ids: run ids.
    """
    told = {name: metadata[name] for name in _HINTS if name in metadata}
    told |= {name: str(value) for name, value in ids.items() if value is not None}
    return {k: v if isinstance(v, str | int) else str(v) for k, v in told.items()}


def session_of(hints: Mapping[str, Json] | None) -> str | None:
    """The session that a call says it belongs to: its thread, as agents call it.

    Args:
        hints: `hints_of` the call.
    """
    thread = str((hints or {}).get("thread_id", ""))
    return f"{THREAD}{thread}"[:MAX_SESSION_CHARS] if thread else None


THREAD: Final = "thread "
"""Sessions that the app itself has named begin so."""
MAX_SESSION_CHARS = 256

_HINTS = ("thread_id", "langgraph_node", "langgraph_step", "langgraph_checkpoint_ns")
