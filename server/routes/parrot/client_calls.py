"""Translation of the calls of Microsoft's Parrot client to the nodes of a program.

A *semantic call* is a prompt with `{{name}}` placeholders, a *native call* a function. Byte code
that a client sends with a native call is never decoded: only the function's name counts.

Out of scope: HTTP, and sessions.

Invariants: every generated name ends in the request's random suffix. Unknown fields of a call are
ignored, because the client adds some; unknown fields of a parameter are rejected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

from ...program.errors import ProgramError
from ...program.expressions.values import text_of
from ...program.ir import (
    MAX_OUTPUT_TOKENS,
    AnyNode,
    Append,
    CallNode,
    ExprNode,
    GenerateNode,
    Json,
    Objective,
    Segment,
    Variable,
)
from .sessions import CRITERIA

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}")
SessionNumber = Annotated[int, Meta(ge=0, le=2**53)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_MAX_STEM = 64
"""Characters of a client's name that its variable keeps."""


class SamplingConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sampling parameters of an output, with the client's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_gen_length: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] = 512
    """Upper limit; reduced to what the context leaves."""
    ignore_tokenizer_eos: bool = False
    stop_token_ids: list[_TokenId] = []
    stop_str: str | list[str] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[_TokenId, float] | None = None
    repetition_penalty: float = 0.0
    """0 is off."""
    n: Json = 1
    """Ignored, as in Parrot; and so are the fields below."""
    best_of: Json = 1
    length_penalty: Json = 0.0


class CallParameter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter of a call: an output, or an input with a variable or a value."""

    name: str
    is_output: bool
    var_id: str | None = None
    value: Json = None
    sampling_config: SamplingConfig | None = None


class SemanticCall(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/semantic_call`."""

    session_id: SessionNumber
    template: Annotated[str, Meta(max_length=4_194_304)]
    parameters: Annotated[list[CallParameter], Meta(max_length=1_000)]
    func_name: Json = ""
    models: Annotated[list[str], Meta(max_length=16)] = []
    """The call may use any of these; empty for the server's default."""
    remove_pure_fill: bool = True
    """Whether text after the last output is dropped."""
    output_criteria: str | None = None
    """Starts the call at once; otherwise it starts when one of its outputs is requested."""
    model_type: Json = None
    """Ignored, and so are the fields below."""
    cache_prefix: Json = None
    fuse_fill: Json = None


class NativeCall(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/py_native_call`."""

    session_id: SessionNumber
    func_name: Annotated[str, Meta(min_length=1, max_length=128)]
    parameters: Annotated[list[CallParameter], Meta(max_length=1_000)]
    func_code: Json = None
    """Byte code. Never decoded."""
    timeout: Annotated[float, Meta(gt=0, le=7 * 86_400)] | None = None
    output_criteria: str | None = None


class BoundParameter(Struct, frozen=True, kw_only=True):
    """The variable of a parameter."""

    parameter_name: str
    is_output: bool
    var_name: str
    var_id: str


@dataclass(slots=True)
class LoweredCall:
    """What a call adds to its session."""

    request_id: int
    nodes: list[AnyNode] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    inputs: dict[str, Json] = field(default_factory=dict)
    bound: list[BoundParameter] = field(default_factory=list)

    @property
    def append(self) -> Append:
        """The change of the session's program."""
        return Append(variables=self.variables, nodes=self.nodes, inputs=self.inputs)

    @property
    def new_variables(self) -> set[str]:
        """The variables that this call declares or produces."""
        return {*self.variables, *(each.var_id for each in self.bound if each.is_output)}

    @property
    def last_output(self) -> str | None:
        """The variable of the last output."""
        outputs = [each.var_id for each in self.bound if each.is_output]
        return outputs[-1] if outputs else None

    def bind(self, parameter: CallParameter, suffix: str) -> str:
        """Add an occurrence of a parameter and return its variable."""
        variable = parameter.var_id
        if variable is None:
            variable = fresh_name(parameter.name, suffix)
            if parameter.is_output and any(each.var_id == variable for each in self.bound):
                variable = fresh_name(f"{parameter.name}_{len(self.bound)}", suffix)
            if not parameter.is_output:
                self.variables[variable] = Variable()
                self.inputs[variable] = text_of(parameter.value)
        self.bound.append(
            BoundParameter(
                parameter_name=parameter.name,
                is_output=parameter.is_output,
                var_name=parameter.name,
                var_id=variable,
            )
        )
        return variable


def fresh_name(name: str, suffix: str) -> str:
    """Return a variable for a name of the client, which may have any characters."""
    stem = re.sub(r"\W", "_", name[:_MAX_STEM], flags=re.ASCII)
    return f"v_{stem}_{suffix}" if not stem[:1].isalpha() else f"{stem}_{suffix}"


def read_criteria(criteria: str) -> Objective:
    """Return the objective of a criterion.

    Raises:
        ProgramError: `get.unknown_criteria`.
    """
    objective = CRITERIA.get(criteria.lower())
    if objective is None:
        raise ProgramError(
            "get.unknown_criteria",
            f"unknown criterion {criteria!r}; use one of {', '.join(CRITERIA)}",
            path="criteria",
        )
    return objective


def lower_semantic_call(call: SemanticCall, suffix: str) -> LoweredCall:
    """Translate a prompt to a node.

    Args:
        call: the request.
        suffix: hexadecimal digits that end every new name.

    Raises:
        ProgramError: if template and parameters do not fit.
    """
    parameters = _check_parameters(call.parameters, has_sampling=True)
    lowered = LoweredCall(int(suffix, 16))
    segments: list[Segment] = []
    num_used = 0
    """Segments up to the last output."""
    end = 0
    for match in _PLACEHOLDER.finditer(call.template):
        if match.start() > end:
            segments.append(Segment(text=call.template[end : match.start()]))
        end = match.end()
        parameter = parameters.get(match[1])
        if parameter is None:
            raise _error("placeholder", f"{match[0]} is not among the parameters", "template")
        if parameter.is_output and not segments:
            raise _error(
                "starts_with_output",
                f"the template starts with the output {match[0]}: put text or an input before it",
                "template",
            )
        variable = lowered.bind(parameter, suffix)
        if parameter.is_output:
            segments.append(_output(parameter, variable))
            num_used = len(segments)
        else:
            segments.append(Segment(input=variable))
    if not num_used:
        if call.remove_pure_fill:
            raise _error(
                "no_output", "the template has no output: add a placeholder for one", "template"
            )
        return lowered
    if call.remove_pure_fill:
        segments = segments[:num_used]
    elif end < len(call.template):
        segments.append(Segment(text=call.template[end:]))
    lowered.nodes.append(
        GenerateNode(
            id=f"r_{suffix}",
            model=call.models or "default",
            prompt=segments,
            meta={"function": call.func_name},
        )
    )
    return lowered


def lower_native_call(call: NativeCall, suffix: str) -> LoweredCall:
    """Translate a native call to a call of the registered function of the same name.

    The function receives the inputs as keyword arguments. It returns the value of its output, or
    of several outputs an object with a value for each.

    Raises:
        ProgramError: if the parameters are inconsistent, or there is no output.
    """
    parameters = _check_parameters(call.parameters, has_sampling=False)
    lowered = LoweredCall(int(suffix, 16))
    args: dict[str, Json] = {}
    outputs: dict[str, str] = {}
    for name, parameter in parameters.items():
        if parameter.is_output:
            outputs[name] = lowered.bind(parameter, suffix)
        elif parameter.var_id is None:
            args[name] = text_of(parameter.value)
        else:
            args[name] = {"var": lowered.bind(parameter, suffix)}
    if not outputs:
        raise _error("no_output", f"function {call.func_name!r} has no output", "parameters")
    result = next(iter(outputs.values()))
    if len(outputs) > 1:
        result = fresh_name("result", suffix)
        lowered.nodes += [
            ExprNode(id=f"o{i}_{suffix}", expr={"get": [{"var": result}, name]}, output=variable)
            for i, (name, variable) in enumerate(outputs.items())
        ]
    timeout: dict[str, Any] = {} if call.timeout is None else {"timeout_s": call.timeout}
    lowered.nodes.append(
        CallNode(id=f"r_{suffix}", function=call.func_name, args=args, output=result, **timeout)
    )
    return lowered


def _check_parameters(
    given: list[CallParameter], *, has_sampling: bool
) -> dict[str, CallParameter]:
    parameters: dict[str, CallParameter] = {}
    for i, parameter in enumerate(given):
        path = f"parameters[{i}]"
        if parameter.name in parameters:
            raise _error("duplicate_parameter", f"{parameter.name!r} is listed twice", path)
        parameters[parameter.name] = parameter
        fault = _fault(parameter, has_sampling)
        if fault is not None:
            raise _error("parameter", f"parameter {parameter.name!r}: {fault}", path)
    return parameters


def _fault(parameter: CallParameter, has_sampling: bool) -> str | None:
    if parameter.sampling_config is not None and not (parameter.is_output and has_sampling):
        return "only an output of a semantic call has a sampling_config"
    if parameter.is_output:
        if parameter.var_id is not None or parameter.value is not None:
            return "an output has neither var_id nor value; the server creates its variable"
        return None
    if (parameter.var_id is None) == (parameter.value is None):
        return "an input has either var_id or value"
    return None


def _output(parameter: CallParameter, variable: str) -> Segment:
    config = parameter.sampling_config or SamplingConfig()
    stops = [config.stop_str] if isinstance(config.stop_str, str) else config.stop_str or []
    return Segment(
        output=variable,
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_gen_length,
        ignore_eos=config.ignore_tokenizer_eos,
        stop=[stop for stop in stops if stop],
        stop_token_ids=config.stop_token_ids,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        repetition_penalty=config.repetition_penalty or 1.0,
        logit_bias=config.logit_bias or {},
    )


def _error(code: str, message: str, path: str) -> ProgramError:
    return ProgramError(f"semantic_call.{code}", message, path=path)
