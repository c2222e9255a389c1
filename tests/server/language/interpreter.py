"""A naive interpreter of the decoder language: statement after statement, value after value.

It runs jobs where they start, lists item by item, and every call at once, with the fake engine's
public text for a prompt. The server must give the same values, and in each job the same yields.
"""

from __future__ import annotations

import ast
import contextlib
import json
import operator
from collections.abc import Callable
from typing import Any

from conure.engine.testing.scripted_runner import default_text
from conure.engine.text.byte_tokenizer import SPECIAL_IDS, TURN_END, TURN_START
from conure.server.language.syntax import rewrite
from conure.server.language.template import InputSlot, OutputSlot, parse_template

OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.In: lambda left, right: left in right,
}
KILLED = object()  # the value of a variable that is killed


class FailureError(Exception):
    """A failure of the program."""


class KilledError(Exception):
    """What reads a killed value is skipped."""


class JobEndError(Exception):
    """A `wait` for a killed value ends the job."""


class RoundEndError(Exception):
    """The round ends, and the loop with it or not."""


class ReturnedError(Exception):
    """The function ends, with a value."""


class Interpreter:
    """Runs one program."""

    def __init__(self, source: str) -> None:
        self.yields: list[tuple[int, Any]] = []
        """The values with the number of their job, in the order of the text."""
        self._tree = ast.parse(rewrite(source))
        self._functions: dict[str, ast.FunctionDef] = {}
        self._job = 0
        self._num_jobs = 0

    def run(self) -> list[tuple[int, Any]]:
        with contextlib.suppress(JobEndError, ReturnedError):
            self._block(self._tree.body, {})
        return self.yields

    def _block(self, statements: list[ast.stmt], names: dict[str, Any]) -> None:
        for statement in statements:
            self._statement(statement, names)

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> None:  # noqa: C901
        match node:
            case ast.FunctionDef(name=name):
                self._functions[name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = self._or_killed(value, names)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                for target, item in zip(targets, self._value(value, names), strict=True):
                    assert isinstance(target, ast.Name)
                    names[target.id] = item
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                names[name] = names[name] + self._value(value, names)
            case ast.Expr(value=ast.Yield(value=ast.expr() as value)):
                if (found := self._or_killed(value, names)) is not KILLED:
                    self.yields.append((self._job, found))
            case ast.Expr(value=ast.Call(func=ast.Name(id="wait"), args=waited)):
                if any(self._or_killed(each, names) is KILLED for each in waited):
                    raise JobEndError
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="kill"))):
                pass  # what is killed here has ended already, or is KILLED from its beginning
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(ast.Name(name), "append"), args=[item])
            ):
                names[name] = [*names[name], self._value(item, names)]
            case ast.Expr(value=value):
                self._value(value, names)
            case ast.If(test=test) if self._or_killed(test, names) is KILLED:
                pass  # the programs read nothing that such a branch assigns
            case ast.If(test=test, body=body, orelse=otherwise):
                self._block(body if self._value(test, names) else otherwise, names)
            case ast.For():
                self._loop(node, names)
            case ast.With(body=body):
                outer, self._num_jobs = self._job, self._num_jobs + 1
                self._job = self._num_jobs
                with contextlib.suppress(JobEndError):
                    self._block(body, names)
                self._job = outer
            case ast.Try(body=body, handlers=[handler]):
                before = dict(names)
                try:
                    self._block(body, names)
                except FailureError:
                    names.clear()
                    names.update(before)
                    self._block(handler.body, names)
            case ast.Return(value=value):
                raise ReturnedError(None if value is None else self._value(value, names))
            case ast.Break() | ast.Continue():
                raise RoundEndError(isinstance(node, ast.Break))
            case _:
                raise AssertionError(ast.dump(node))

    def _or_killed(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """Return the value of an expression; KILLED if it reads a killed value."""
        try:
            return self._value(node, names)
        except KilledError:
            return KILLED

    def _loop(self, node: ast.For, names: dict[str, Any]) -> None:
        items = self._value(node.iter, names)
        for item in items:
            self._bind(node.target, item, names)
            try:
                self._block(node.body, names)
            except RoundEndError as end:
                if end.args[0]:
                    break

    def _bind(self, target: ast.expr, item: Any, names: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = item
            case ast.Tuple(elts=[ast.Name(id=index), ast.Name(id=name)]):
                names[index], names[name] = item

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:  # noqa: C901
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                if names[name] is KILLED:
                    raise KilledError
                return names[name]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item, names) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {key.value: self._value(value, names) for key, value in pairs}  # type: ignore[union-attr]
            case ast.JoinedStr(values=parts):
                return "".join(self._text(part, names) for part in parts)
            case ast.IfExp(test=test, body=body, orelse=otherwise):
                return self._value(body if self._value(test, names) else otherwise, names)
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](self._value(left, names), self._value(right, names))
            case ast.UnaryOp(op=op, operand=operand):
                value = self._value(operand, names)
                return not value if isinstance(op, ast.Not) else -value
            case ast.BoolOp(op=op, values=values):
                first, *others = values
                value = self._value(first, names)
                while others and bool(value) != isinstance(op, ast.Or):
                    value = self._value(others.pop(0), names)
                return value
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return OPERATORS[type(op)](self._value(left, names), self._value(right, names))
            case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper)):
                bounds = [None if b is None else self._value(b, names) for b in (lower, upper)]
                return self._value(value, names)[slice(*bounds)]
            case ast.Subscript(value=value, slice=key):
                return self._item(self._value(value, names), self._value(key, names))
            case ast.ListComp(elt=element, generators=[generator]):
                return self._comprehension(element, generator, names)
            case ast.Call():
                return self._call(node, names)
            case _:
                raise AssertionError(ast.dump(node))

    def _text(self, node: ast.expr, names: dict[str, Any]) -> str:
        value = self._value(node.value if isinstance(node, ast.FormattedValue) else node, names)
        if isinstance(value, dict) and "role" in value:
            value = value["content"]
        if isinstance(value, str):
            return value
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    def _item(self, value: Any, key: Any) -> Any:
        if isinstance(value, dict):
            return value.get("content" if key == "context" else key)
        return value[key] if -len(value) <= key < len(value) else None

    def _comprehension(
        self, element: ast.expr, generator: ast.comprehension, names: dict[str, Any]
    ) -> list[Any]:
        result = []
        for item in self._value(generator.iter, names):
            inner = dict(names)
            self._bind(generator.target, item, inner)
            if all(self._value(test, inner) for test in generator.ifs):
                result.append(self._value(element, inner))
        return result

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:  # noqa: C901
        options = {each.arg: self._value(each.value, names) for each in node.keywords if each.arg}
        if isinstance(node.func, ast.Attribute):
            arguments = [self._value(each, names) for each in node.args]
            return self._method(node.func.attr, self._value(node.func.value, names), arguments)
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        if name in ("client", "first"):  # no client answers; the programs kill such calls
            found = (self._or_killed(each, names) for each in node.args)
            value = next((each for each in found if each is not KILLED), KILLED)
            if name == "client" or value is KILLED:
                raise KilledError
            return value
        arguments = [self._value(each, names) for each in node.args]
        if name in self._functions:
            return self._function(self._functions[name], arguments)
        match name, arguments:
            case "gen", [prompt]:
                return default_text(list(prompt.encode()))[: options["max_tokens"]]
            case "llm_chat", [messages]:
                return {"role": "assistant", "content": self._chat(messages, options["max_tokens"])}
            case (("user" | "system" | "assistant"), [text]):
                return {"role": name, "content": text}
            case "parse_json", [text]:
                try:
                    return json.loads(text)
                except ValueError as error:
                    raise FailureError from error
            case "fail", _:
                raise FailureError
            case "range", _:
                return list(range(*arguments))
            case "enumerate", [items]:
                return list(enumerate(items))
            case _:
                pure: Any = (len, sum, sorted, max, min, str)
                return next(each for each in pure if each.__name__ == name)(*arguments)

    def _chat(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        start, end = SPECIAL_IDS[TURN_START], SPECIAL_IDS[TURN_END]
        ids: list[int] = []
        for message in messages:
            turn = f"{message['role']}\n{message['content']}".encode()
            ids += [start, *turn, end, *b"\n"]
        return default_text([*ids, start, *b"assistant\n"])[:max_tokens]

    def _method(self, name: str, value: Any, arguments: list[Any]) -> Any:
        text = value["content"] if isinstance(value, dict) else value
        match name:
            case "contains":
                return arguments[0] in text
            case "get":
                return value.get(*arguments)
            case _:
                names = "upper lower strip split replace join startswith endswith"
                methods: dict[str, Any] = {each: getattr(str, each) for each in names.split()}
                return methods[name](text, *arguments)

    def _function(self, node: ast.FunctionDef, arguments: list[Any]) -> Any:
        names = dict(zip((each.arg for each in node.args.args), arguments, strict=True))
        match node.body:
            case [ast.Expr(value=ast.Constant(value=str(text)))]:
                return self._semantic(text, names)
        try:
            self._block(node.body, names)
        except ReturnedError as signal:
            return signal.args[0]
        return None

    def _semantic(self, text: str, names: dict[str, Any]) -> Any:
        prompt, outputs = "", []
        for part in parse_template(text):
            match part:
                case str():
                    prompt += part
                case InputSlot(name=name):
                    prompt += self._text(ast.Name(name), names)
                case OutputSlot(name=name, options=options):
                    answer = default_text(list(prompt.encode()))[: options["max_tokens"]]
                    prompt, names = prompt + answer, {**names, name: answer}
                    outputs.append(answer)
        return outputs[0] if len(outputs) == 1 else outputs
