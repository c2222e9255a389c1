"""Names and values of results: swaps, early returns, JSON answers, lists, races, and waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.server.language.compiler import compile_source
from conure.server.language.errors import LanguageError
from conure.server.program.errors import RunError
from conure.server.program.nodes.bodies import walk
from conure.server.program.procedures import PutProcedure

from ..inprocess import ServerHarness, server_harness

TOTAL = "{'type': 'object', 'properties': {'total': {'type': 'integer'}}, 'required': ['total']}"
LONG = "x" * 100


def error_of(source: str) -> str:
    with pytest.raises(LanguageError) as caught:
        compile_source(source, signatures={})
    return caught.value.message


async def run(harness: ServerHarness, source: str) -> tuple[list[Any], dict[str, Any]]:
    """Return what a program yields, and the values of its outputs."""
    program = await harness.submit_source(source)
    status = await program.end()
    assert status.status == "done", status.error
    yields = [each.data["value"] for each in await program.events() if each.type == "yield"]
    values = {name: each.value for name, each in status.variables.items() if each.status == "done"}
    return yields, {name: values[name] for name in status.outputs if name in values}


# --- names ------------------------------------------------------------------------------------


async def test_names_that_are_swapped_are_outputs_with_their_last_values(tmp_path: Path) -> None:
    source = "a = gen('A', max_tokens=4)\nb = gen('B', max_tokens=4)\n"
    async with server_harness(tmp_path) as harness:
        (before,), _ = await run(harness, f"{source}yield [a, b]")
        (after,), outputs = await run(harness, f"{source}a, b = b, a\nyield [a, b]")
    assert after == [*reversed(before)]
    assert outputs == {"a": after[0], "b": after[1]}


def test_a_second_name_of_an_earlier_value_is_an_output() -> None:
    source = "x = gen('A')\ny = x\nfor _ in range(2):\n    x = gen(x)\nyield {'x': x, 'y': y}"
    assert compile_source(source).outputs == ["x", "y"]


FUNCTIONS = """def shout(text):
    return text.upper()
def ask(text):
    b = gen(text)
    return b + '!'
def choose(text):
    if text == 'x':
        return gen(text)
    return text
def write(text):
    \"\"\"Write {{text}}: {{name=out}} {{name=more}}\"\"\"
q: str
x = gen('A')
y = gen('B')
"""


@pytest.mark.parametrize(
    "value",
    [
        "len(x)", "x + y", "x.strip()", "f'{x}!'", "gen('c')", "llm_chat([user(x)])", "[x, y]",
        "llm_chat([user(x)])['content']", "[gen(word) for word in ['a', 'b']]", "x == y", "-1",
        "[word for word in [x, y]]", "x if x == y else y", "gen('a') if x == y else 'k'", "'text'",
        "shout(x)", "ask(x)", "choose(x)", "write(x)", "first(x, y)", "race(x, y)", "max([1, 2])",
        "q.strip()", "json.parse(x)", "client('stock', of=x)", "call('other', a=x)", "not x",
        "x.split(' ')[0]", "shout(ask(x))", "shout(shout(x))", "ask(shout(ask(x)))",
        "{'result': x}", "{'result': len(x)}",
    ],
)  # fmt: skip
def test_a_returned_value_without_a_name_is_called_result(value: str) -> None:
    for before in ("", "with job():\n    yield x\n", "if x == 'k':\n    return y\n"):
        outputs = compile_source(f"{FUNCTIONS}{before}return {value}").outputs
        assert outputs == (["result", "x"] if "yield" in before else ["result"])


@pytest.mark.parametrize("name", ["x", "q"])
def test_a_returned_name_is_the_name_of_the_result(name: str) -> None:
    assert compile_source(f"{FUNCTIONS}return {name}").outputs == [name]


@pytest.mark.parametrize("value", ["x", "len(x)", "gen(x)", "ask(x)", "[gen(z) for z in [x]]"])
def test_the_keys_of_a_returned_dict_are_the_names_of_the_results(value: str) -> None:
    source = f"{FUNCTIONS}return {{'a': {value}, 'b': ask(y), 'y': y}}"
    assert compile_source(source).outputs == ["a", "b", "y"]


@pytest.mark.parametrize(
    ("source", "outputs"),
    [
        ("reply = llm_chat('A')\nreturn {'reply': reply['content'], 'n': 1}", ["reply", "n"]),
        ("a = gen('A')\nb = gen(a)\nreturn {'a': b, 'b': a}", ["a", "b"]),
        ("a = gen('A')\na = gen(a)\nreturn {'a': a + '!'}", ["a"]),
        ("a = gen('A')\nreturn {'a': a, 'b': a}", ["a", "b"]),
        ("n: int\nreturn {'n': n, 'a': gen('A')}", ["n", "a"]),
        ("n: int\nreturn n", ["n"]),
        ("b = 2\nreturn b", ["b"]),
        ("result = 1\nreturn result", ["result"]),
        ("result = gen('A')\nreturn len(result)", ["result"]),
        ("result = gen('A')\nyield result\nreturn len(result)", ["result", "result_2"]),
        ("result = 1\nif gen('A') == 'x':\n    return 2\nreturn result", ["result"]),
        ("result: str\nreturn result + '!'", ["result_2"]),
        ("yield gen('A')\nreturn None", ["text"]),
    ],
)
def test_return_names_its_values(source: str, outputs: list[str]) -> None:
    assert compile_source(source).outputs == outputs


@pytest.mark.parametrize("key", ["my a", "a-b", "1", "", "a" * 129])
def test_a_key_that_cannot_name_an_output_is_refused(key: str) -> None:
    function = f"def f(x):\n    return {{{key!r}: x}}\na = gen('A')\n"
    for value in (f"{{'b': a, {key!r}: a}}", "f(a)"):
        assert f"cannot have the name {key[:40]!r}" in error_of(f"{function}return {value}")
    assert compile_source(f"{function}d = f(a)\nreturn d").outputs == ["d"]


@pytest.mark.parametrize("value", ["n + 1", "gen('A')", "a"])
def test_a_returned_dict_gives_an_input_no_other_value(value: str) -> None:
    message = error_of(f"n: int\na = gen('B')\nreturn {{'a': a, 'n': {value}}}")
    assert "`n` is an input and keeps its value" in message


async def test_a_job_reads_its_own_result_and_not_the_returned_one(tmp_path: Path) -> None:
    source = """
with job():
    yield {'first': result}
with job():
    result = gen('A', max_tokens=4)
return len(result)
"""
    async with server_harness(tmp_path) as harness:
        ((first,), outputs) = await run(harness, source)
    assert outputs == {"result": first["first"], "result_2": 4}


async def test_a_procedure_may_return_a_parameter(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        text = "n: int\nreturn {'n': n, 'twice': 2 * n}"
        body = PutProcedure(source=text)
        await harness.executor.procedures.put("double", body, tenant=harness.tenant)
        yields, _ = await run(harness, "yield call('double', n=4)")
    assert yields == [{"n": 4, "twice": 8}]


def test_a_second_name_of_a_value_makes_no_node() -> None:
    program = compile_source("x = gen('A')\ny = x\nyield {'y': y}")
    assert [node.id for node in program.nodes] == ["x", "yield"]


F = "def f(x):\n    result = gen(x)\n    return result\n"


@pytest.mark.parametrize(
    "source",
    [
        "a = gen('A')\nif a:\n    return 'early'\nreturn a + '!'",
        "a = gen('A')\nif a:\n    return gen('B')\nyield {'a': 1}",
        "a = gen('A')\nif a:\n    if a == 'x':\n        return a\n    return 'y'\nreturn 'z'",
        f"{F}return f('A') + f('B')",
        f"{F}if f('A'):\n    return 'x'\nreturn f('B')",
    ],
)
def test_a_returned_value_is_the_result(source: str) -> None:
    assert compile_source(source).outputs == ["result"]


THREE_WAYS = """
a = gen('A', max_tokens=4)
n: int
if n == 1:
    return {'n': n, 'answer': 'first', 'a': a}
elif n == 2:
    answer = gen('B', max_tokens=4)
    return {'answer': answer, 'a': len(answer), 'n': n}
b = gen('C', max_tokens=4)
return {'n': n, 'a': b, 'answer': llm_chat(b, max_tokens=4)['content']}
"""


async def test_all_branches_may_return_dicts_with_the_same_names(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        for n in (1, 2, 3):
            source = THREE_WAYS.replace("n: int", f"n: int = {n}")
            _, outputs = await run(harness, source)
            assert outputs.keys() == {"n", "answer", "a"}
            assert outputs["n"] == n
            assert (outputs["answer"] == "first") == (n == 1)
            assert (outputs["a"] == 4) == (n == 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("{'a': 1}", "{'b': 1}"),
        ("{'a': 1}", "{'a': 1, 'b': 1}"),
        ("{'a': 1}", "1"),
        ("{'my a': 1}", "{'my a': 2}"),
        ("{'q': q}", "{'q': 1}"),
    ],
)
def test_branches_that_return_other_names_give_one_result(first: str, second: str) -> None:
    for end in (f"return {second}", f"if q == 'y':\n    return {second}\nreturn {second}"):
        source = f"q: str\nif q == 'x':\n    return {first}\n{end}"
        assert compile_source(source).outputs == ["result"]


def test_a_job_may_read_a_name_that_branches_return_later() -> None:
    jobs = "with job():\n    yield a\nwith job():\n    a = gen('A')\n"
    source = f"n: int\n{jobs}if n > 1:\n    return {{'a': a, 'b': 1}}\nreturn {{'b': 2, 'a': a}}"
    assert compile_source(source).outputs == ["a", "b"]


def test_a_path_without_a_return_gives_one_result() -> None:
    source = "a = gen('A')\nif a:\n    return {'a': a}\nyield {'b': a}"
    assert compile_source(source).outputs == ["result", "a"]


async def test_nothing_runs_after_a_return_in_a_branch(tmp_path: Path) -> None:
    source = """
a = gen('A', max_tokens=4)
with job():
    yield {'first': a}
if len(a) == 4:
    return
with job():
    fail('must not run')
b = gen('B', max_tokens=4)
yield {'b': b}
"""
    async with server_harness(tmp_path) as harness:
        yields, outputs = await run(harness, source)
    assert [*yields[0]] == ["first"]
    assert len(yields) == 1
    assert "b" not in outputs


async def test_enumerated_items_can_be_filtered(tmp_path: Path) -> None:
    source = """
items = ['a', 'b', 'c', 'd']
marks = [1, 0, 1, 1]
pure = [f'{i}{x}' for i, x in enumerate(items) if marks[i] == 1 if x != 'd']
calls = [gen(f'{i}{x}', max_tokens=4) for i, x in enumerate(items) if i > 1]
expected = [gen('2c', max_tokens=4), gen('3d', max_tokens=4)]
yield [pure, calls == expected]
"""
    async with server_harness(tmp_path) as harness:
        yields, _ = await run(harness, source)
    assert yields == [[["0a", "2c"], True]]


# --- JSON answers -----------------------------------------------------------------------------


async def test_the_content_of_a_json_answer_is_the_json(tmp_path: Path) -> None:
    chat = "llm_chat([user('a')], max_tokens=60, "
    source = f"""
m = {chat}schema={TOTAL})
if m["total"] == 0:
    number = {chat}type=int)
else:
    number = {chat}type=int, seed=2)
same = m
direct = {chat}schema={TOTAL})["content"]
yield [m == m["content"], number == number["context"], same["content"]["total"] == m["total"]]
yield [m.get("content") == m, direct == m]
"""
    async with server_harness(tmp_path) as harness:
        yields, _ = await run(harness, source)
    assert yields == [[True, True, True], [True, True]]


@pytest.mark.parametrize("choice", ["", ", tool_choice='none'"])
def test_the_content_of_an_answer_with_tools_has_a_name(choice: str) -> None:
    call = f"llm_chat('x', tools=[{{'type': 'function', 'function': {{'name': 'f'}}}}]{choice})"
    program = compile_source(f"text = {call}['content']\nyield {{'text': text}}")
    assert [node.id for node in program.nodes] == ["answer", "text", "yield"]
    assert program.outputs == ["text"]
    program = compile_source(f"return {call}['content']")
    assert [node.id for node in program.nodes] == ["answer", "result"]


def test_a_field_that_is_named_content_is_that_field() -> None:
    schema = TOTAL.replace("total", "content")
    for each in (schema, "{'type': 'object'}", "{'$ref': '#/$defs/a', '$defs': {'a': {}}}"):
        source = f"m = llm_chat([user('a')], schema={each})\nyield m['content']"
        (_, node) = compile_source(source).nodes
        assert msgspec.to_builtins(node)["value"] == {"get": [{"var": "m"}, "content"]}


# --- races, kills and waits -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("'b'", "would always win"),
        ("long", "would always win"),
        ("question", "would always win"),
        ("a + '!'", "assign this value to a name first"),
        ("a", "same value twice"),
        ("same", "same value twice"),
    ],
)
def test_a_race_takes_results_of_different_calls(other: str, message: str) -> None:
    names = f"question: str\nlong = '{LONG}'\na = gen('A')\nsame = a\n"
    for race in (f"w = race(a, {other})\n", f"if a == 'x':\n    w = race(a, {other})\n"):
        assert message in error_of(f"{names}{race}yield a")


def test_an_input_cannot_be_killed_in_a_branch() -> None:
    message = error_of("x: str\na = gen('A')\nif a == 'b':\n    x.kill()\nyield a")
    assert "`x` has its value already" in message


async def test_expressions_after_an_unmet_wait_are_skipped(tmp_path: Path) -> None:
    source = """
never = client("never")
with job():
    found = gen("A", max_tokens=4)
    if len(found) == 4:
        never.kill()
with job():
    wait never
    size = len(found)
    broken = parse_json(found)
    yield {"size": size, "broken": broken}
yield {"found": len(found)}
"""
    async with server_harness(tmp_path) as harness:
        yields, outputs = await run(harness, source)
    assert yields == [{"found": 4}]
    assert not {"size", "broken"} & outputs.keys()


def test_expressions_do_not_wait_for_yields() -> None:
    program = compile_source("a = gen('A')\nyield a\nb = len(a)\nyield b")
    nodes = {node.id: node for _, node in walk(program.nodes, "")}
    assert not nodes["b"].after


async def test_a_wait_for_a_job_ends_with_the_last_job_in_it_also_by_a_kill(tmp_path: Path) -> None:
    source = """
with job() as outer:
    with job():
        x = gen("x", max_tokens=9)
        yield {"inner": x}
    with job():
        never = client("never")
with job():
    wait x
    outer.kill()
wait outer
yield {"done": 1}
"""
    async with server_harness(tmp_path) as harness:
        yields, _ = await run(harness, source)
    assert [*map(list, yields)] == [["inner"], ["done"]]


async def test_the_first_of_several_jobs_ends_a_wait(tmp_path: Path) -> None:
    source = """
with job() as slow:
    never = client("never")
with job() as fast:
    x = gen("x", max_tokens=4)
wait(slow, fast, any=True)
yield {"x": x}
slow.kill()
"""
    async with server_harness(tmp_path) as harness:
        yields, _ = await run(harness, source)
    assert [*map(list, yields)] == [["x"]]


# --- values of unknown kind -------------------------------------------------------------------


async def test_a_round_may_assign_a_value_of_unknown_kind(tmp_path: Path) -> None:
    source = """
x = "start"
for i in range(2):
    yield f"v: {x}"
    yield x if i == 0 else x[0]
    x = parse_json("[1,2]")
"""
    async with server_harness(tmp_path) as harness:
        yields, _ = await run(harness, source)
    assert yields == ["v: start", "start", "v: [1,2]", 1]


async def test_a_text_of_unknown_kind_has_characters(tmp_path: Path) -> None:
    source = """
x = "start"
for i in range(2):
    yield x[0] + x[-1]
    x = parse_json('"next"')
"""
    async with server_harness(tmp_path) as harness:
        yields, _ = await run(harness, source)
    assert yields == ["st", "nt"]


async def test_a_negative_index_counts_from_the_end_of_any_list(tmp_path: Path) -> None:
    source = """
d = parse_json("[1, 2, 3]")
k = parse_json("-2")
yield [d[-1], d[k], d.get(-3), d[-4], [1, 2][-1], "abc"[-1]]
"""
    async with server_harness(tmp_path) as harness:
        yields, _ = await run(harness, source)
    assert yields == [[3, 2, 1, None, 2, "c"]]


async def test_a_procedure_is_called_again_after_a_failure(tmp_path: Path) -> None:
    attempts: list[int] = []

    def third() -> int:
        attempts.append(1)
        if len(attempts) < 3:
            raise RunError("third.early", "not yet")
        return len(attempts)

    async with server_harness(tmp_path, functions={"third": third}) as harness:
        body = PutProcedure(source="n = third()\nreturn n")
        await harness.executor.procedures.put("count", body, tenant=harness.tenant)
        yields, _ = await run(harness, "n = call('count', retries=2)\nyield n")
    assert yields == [3]
