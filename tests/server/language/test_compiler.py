"""The records that texts are compiled to, and the errors of invalid texts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from conure.server.language.compiler import compile_source, locate
from conure.server.language.errors import LanguageError, SourceNameError
from conure.server.language.lowering.methods import FUNCTIONS, METHODS
from conure.server.program.decoding.bodies import revalidate
from conure.server.program.errors import ProgramError
from conure.server.program.expressions.evaluate import evaluate
from conure.server.program.graph.graph import Graph
from conure.server.program.ir import CallNode, Program, Submission
from conure.server.program.nodes.bodies import walk

from . import essay

SIGNATURES = {"rag": ("model", "messages"), "json.parse": ("text",), "lookup": ("key", "limit")}


def compiled(source: str, **options: Any) -> Program:
    """Return the program of a text, after the checks of the graph."""
    program = compile_source(source, **{"signatures": SIGNATURES, **options})
    submission, _ = revalidate(Submission(program=program))
    Graph.build(submission.program, {})
    return program


def nodes_of(source: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Return all nodes as JSON, by id."""
    program = compiled(source, **options)
    return {node.id: msgspec.to_builtins(node) for _, node in walk(program.nodes, "")}


def error_of(source: str, **options: Any) -> LanguageError:
    with pytest.raises(LanguageError) as caught:
        compile_source(source, **{"signatures": SIGNATURES, **options})
    return caught.value


# --- names ------------------------------------------------------------------------------------


def test_the_undefined_default_result_is_refused_by_name() -> None:
    source = essay.FEATURES.replace("RESULT", "default_result")
    error = error_of(source)
    assert isinstance(error, SourceNameError)
    assert (error.code, error.line, error.column) == ("language.undefined_name", 19, 19)
    assert "`default_result` is not defined" in error.message


def test_a_variable_keeps_its_name_and_earlier_versions_get_a_number() -> None:
    nodes = nodes_of("text = gen('a')\ntext = gen(text)\nyield text")
    assert nodes["text"]["prompt"] == [{"input": "text_2"}, {"output": "text"}]


ROUNDS = "answer = ''\nfor i in range(3):\n    answer = gen(f'{i}{answer}')\n"


@pytest.mark.parametrize(
    "source",
    [
        f"{ROUNDS}yield {{'a': answer}}",
        f"{ROUNDS}answer = gen(answer)\nyield {{'a': answer}}",
        f"{ROUNDS}for i in range(2):\n    answer += gen('more')\nyield {{'a': answer}}",
        f"{ROUNDS}return answer",
        f"{ROUNDS}return {{'answer': answer}}",
        "for i in range(2):\n    answer = gen(f'{i}')\nyield {'a': answer}",
        "answer = 0\nfor i in range(2):\n    answer = gen(f'{i}{answer}')\nyield {'a': answer}",
        "answer = []\nfor i in range(2):\n    answer.append(gen(f'{i}'))\nyield {'a': answer}",
        "try:\n    answer = gen('x', timeout=1)\nexcept Timeout:\n    answer = ''\nyield answer",
        "with job():\n    for i in range(2):\n        answer = gen(f'{i}')\nyield {'a': answer}",
        "def f(x):\n    answer = ''\n    for i in range(2):\n        answer = gen(f'{answer}{x}')\n"
        "    return answer\nanswer = f('q')\nyield {'a': answer}",
        "text = gen('a')\nreturn {'answer': text}",
        "answer = [gen(x) for x in ['a', 'b']]\nyield answer",
        "answer, other = gen('a'), gen('b')\nyield {'a': answer}",
        "def f(x):\n    return gen(x), gen(x + '1')\nanswer, other = f('q')\nyield {'a': answer}",
        "first = gen('a')\nanswer = gen('b') if first == 'x' else 'none'\nyield {'a': answer}",
        "n: int\nfor i in range(n):\n    answer = gen('x')\nanswer = gen('y')\nyield answer",
        "for answer in range(2):\n    yield answer\nanswer = gen('y')\nyield answer",
        "answer = gen('y')\nyield answer\nfor answer in range(2):\n    yield answer",
        "b: bool\nif b:\n    answer = 'x'\nanswer = gen('y')\nyield answer",
        "b: bool\nanswer = gen('x')\nif b:\n    answer = answer\nyield answer",
        "b: bool\nif b:\n    return\nanswer = gen('x')\nanswer = gen(answer)\nyield answer",
        "s = gen('x')\ntry:\n    answer = 'x'\nexcept:\n    answer = 'x'\n"
        "answer = gen(f'{s}{answer}')\nyield answer",
        "answer = 'x'\n@program\ndef f(b: bool):\n    answer = gen('y')\n    yield answer",
    ],
)
def test_a_result_has_the_name_that_the_author_gave_it(source: str) -> None:
    assert compiled(source).outputs == ["answer"]


A = "a = gen('A')\n"


@pytest.mark.parametrize(
    "source",
    [
        f"{A}if a:\n    answer = gen('x')\n    yield answer",
        f"{A}with job():\n    if a:\n        answer = gen('x')\n        yield {{'n': answer}}",
        f"{A}if a:\n    with job():\n        answer = gen('x')\n        yield answer",
        f"{A}if a:\n    answer = gen('x')\n    yield answer\nelse:\n    answer = gen('y')",
        f"{A}if a:\n    answer = gen('x')\n    yield answer\nelse:\n    answer = 'none'",
        f"{A}if a:\n    pass\nelif a == '1':\n    answer = gen('x')\n    yield answer",
        f"{A}if a:\n    if a == '1':\n        answer = gen('x')\n        yield answer",
        f"{A}answer = None\nif a:\n    answer = gen('x')\n    yield answer",
        f"{A}answer = gen('x')\nif a:\n    yield answer",
        f"{A}answer = gen('x')\nif a:\n    if a == '1':\n        yield answer",
        f"{A}if a:\n    answer = gen('x')\n    yield answer\n    answer = gen(answer)",
        f"{A}if not a:\n    return\nanswer = gen('x')\nyield answer",
    ],
)
def test_what_a_branch_yields_is_an_output(source: str) -> None:
    assert compiled(source).outputs == ["answer"]


def test_a_name_that_one_branch_assigns_and_yields_cannot_be_read_afterwards() -> None:
    error = error_of(f"{A}if a:\n    x = gen('x')\n    yield x\nyield x")
    assert error.code == "language.maybe_unassigned"


def test_what_a_branch_of_a_loop_yields_is_no_output() -> None:
    loop = "for i in range(2):\n    if a:\n        x = gen(f'{i}')\n        yield x"
    program = compiled(f"{A}{loop}")
    assert program.outputs == []
    assert not any(getattr(node, "merge", None) for _, node in walk(program.nodes, ""))


def test_the_variable_of_a_loop_has_no_value_after_it() -> None:
    for before in ("", "i = 7\n"):
        error = error_of(f"{before}for i in range(3):\n    a = gen(f'{{i}}')\nyield {{'i': i}}")
        assert error.code == "language.maybe_unassigned"
        assert "only inside of the loop" in error.message


@pytest.mark.parametrize(
    ("call", "named"), [("rag('x')", "rag"), ("json.loads('1')", "json.loads")]
)
def test_an_unknown_function_is_refused_with_those_that_exist(call: str, named: str) -> None:
    error = error_of(f"yield {call}", signatures={"lookup": ("key",)})
    assert error.code == "language.unknown_function"
    assert f"unknown function `{named}`" in error.message
    assert "parse_json" in error.message
    assert "lookup" in error.message


@pytest.mark.parametrize("name", ["gne", "genn", "lookpu"])
def test_the_name_of_a_function_that_was_meant_is_suggested(name: str) -> None:
    error = error_of(f"yield {name}('x')", signatures={"lookup": ("key",)})
    meant = "lookup" if name == "lookpu" else "gen"
    assert f"unknown function `{name}`: did you mean `{meant}`?" in error.message


def test_calls_come_first_in_the_list_of_functions() -> None:
    error = error_of("yield rag('x')", signatures={"lookup": ("key",)})
    assert "the language has llm_chat, gen, client, call, race" in error.message


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("max_tokens=-5", "`max_tokens` cannot be -5: expected `int` >= 1"),
        ("temperature='hot'", "`temperature` cannot be 'hot': expected `float`, got `str`"),
        ("stop=3", "`stop` cannot be 3: expected `array`, got `int`"),
    ],
)
@pytest.mark.parametrize("call", ["llm_chat", "gen", "write"])
def test_a_wrong_value_of_an_option_is_refused_at_its_position(
    call: str, option: str, message: str
) -> None:
    function = 'def write(task):\n    """{{task}} {{name=text}}"""\n'
    error = error_of(f"{function}yield {call}('x',\n    {option})")
    column = 5 + option.index("=") + 1
    assert (error.code, error.path) == ("language.argument", f"source:4:{column}")
    assert message in error.message


def test_a_wrong_default_of_an_input_is_refused_at_its_position() -> None:
    error = error_of("x: int = None\nreturn x")
    assert (error.code, error.path) == ("language.argument", "source:1:10")
    assert "`x` is declared as int, got null: change its default" in error.message


def test_a_function_that_an_option_adds_is_refused_with_the_option() -> None:
    error = error_of("yield python('1')", signatures={"lookup": ("key",)})
    assert "unknown function `python`: start the server with `--allow python`" in error.message


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("lookup('a', timeout=1, timeout=2)", "`timeout` is given twice"),
        ("lookup('a', key='b')", "`key` is given twice"),
        ("lookup('a', 'b')", "2 arguments are given, and it takes at most 1"),
        ("client('find', 'b')", "only the first argument has no name: write `name=value`"),
    ],
)
def test_wrong_arguments_of_functions_are_refused(call: str, words: str) -> None:
    assert words in error_of(f"yield {call}", signatures={"lookup": ("key",)}).message


@pytest.mark.parametrize("sign", "+-")
def test_a_sign_before_a_text_is_refused_by_its_name(sign: str) -> None:
    assert f"`{sign}` needs a number, got text" in error_of(f"yield {sign}'a'").message


def test_a_function_of_the_server_is_named_by_the_key_of_its_result() -> None:
    program = compile_source(
        "return {'best': lookup('a'), 'other': list.sum([1])}",
        signatures={"lookup": ("key",), "list.sum": ("items",)},
    )
    assert [type(node) for node in program.nodes] == [CallNode, CallNode]
    assert program.outputs == ["best", "other"]


@pytest.mark.parametrize("read", ["history[0]['context']", "history[0].get('context')"])
def test_the_context_of_a_message_in_a_list_is_its_content(read: str) -> None:
    history = "history = [{'role': 'user', 'context': 'hello'}]"
    nodes = nodes_of(f"{history}\nyield {{'first': {read}}}")
    assert evaluate(nodes["history"]["expr"], {}) == [{"role": "user", "content": "hello"}]
    values = {"history": evaluate(nodes["history"]["expr"], {})}
    assert evaluate(nodes["yield"]["value"], values) == {"first": "hello"}


def test_an_earlier_value_that_was_yielded_is_listed_with_a_number() -> None:
    source = "a = gen('1')\nyield {'first': a}\na = gen('2')\nyield {'second': a}"
    assert compiled(source).outputs == ["a_2", "a"]


def test_a_variable_of_a_later_job_can_be_read() -> None:
    source = """
with job():
    yield {'first': second}
with job():
    second = gen('a')
"""
    assert nodes_of(source)["yield"]["value"] == {"object": {"first": {"var": "second"}}}


def test_a_name_of_a_later_job_that_return_gives_to_another_value_cannot_be_read() -> None:
    source = "with job():\n    yield x\nwith job():\n    x = gen('a')\nreturn {'x': x + '!'}"
    error = error_of(source)
    assert (error.code, error.line) == ("language.undefined_name", 2)
    assert "move the assignment up" in error.message


def test_jobs_that_wait_for_each_other_are_a_cycle() -> None:
    source = """
with job():
    one = gen(f'{two}')
with job():
    two = gen(f'{one}')
yield one
"""
    program = compile_source(source)
    with pytest.raises(ProgramError) as caught:
        Graph.build(program, {})
    assert caught.value.code == "program.cycle"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("if gen('a') == 'b':\n    x = 1\nyield x", "one branch of the `if` does not assign it"),
        ("for i in [gen('a')]:\n    x = i\nfor i in parse_json(gen('b')):\n    z = i\nyield z",
         "may have no round"),
        ("yield later\nlater = 1", "assigned only later"),
        ("with job():\n    yield x\n    x = gen('a')", "read before it is assigned"),
        ("answer = gen('a')\nyield anwser", "did you mean `answer`?"),
        ("yield lookpu('a')", "did you mean `lookup`?"),
        ("x = gen('a')\nyield x.uper()", "did you mean `upper`?"),
    ],
)  # fmt: skip
def test_a_name_without_a_value_is_refused(source: str, message: str) -> None:
    error = error_of(source)
    assert isinstance(error, SourceNameError)
    assert message in error.message


@pytest.mark.parametrize("option", ["timeout=True", "timeout=0", "priority=True", "priority=0.5"])
def test_an_option_of_a_job_has_its_type(option: str) -> None:
    error = error_of(f"with job({option}):\n    a = gen('x')\nyield a")
    assert "cannot be" in error.message


def test_the_priority_of_the_inner_job_counts_even_if_it_is_0() -> None:
    source = "with job(priority=5):\n    with job(priority=0):\n        a = gen('x')\nyield a"
    assert "priority" not in nodes_of(source)["a"]


def test_inputs_are_declared_by_annotations_or_by_the_submission() -> None:
    program = compiled("question: str\ntop: int = 3\nyield gen(question + other)", inputs=["other"])
    assert msgspec.to_builtins(program.variables) == {
        "question": {"type": "string"},
        "top": {"type": "int", "default": 3},
        "other": {},
    }


@pytest.mark.parametrize(
    ("source", "language", "hint"),
    [
        ("limit: int = 3\nreturn limit", "decoder", "did you mean `limit`?"),
        ("x = limit\nreturn x", "decoder", "did you mean `limit`?"),
        ("return gen('tea')", "decoder", "remove it"),
        ("{{limit}} {{name=out}}", "template", "did you mean `limit`?"),
    ],
)
def test_a_value_for_a_name_that_the_text_lacks_is_refused(
    source: str, language: Any, hint: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        compile_source(source, language, inputs={"limt", "limit"} if "limit" in source else {"go"})
    assert caught.value.code == "program.unknown_input"
    assert hint in caught.value.message


def test_a_decorated_function_is_a_program_with_its_parameters_as_inputs() -> None:
    source = """
def shout(text):
    return text.upper()

@conure.program
def greet(name: str, greeting: str = 'Hi'):
    return {'said': shout(gen(f'{greeting}, {name}'))}
"""
    program = compiled(source)
    assert program.name == "greet"
    assert list(program.variables) == ["name", "greeting"]
    assert program.outputs == ["said"]


def test_the_default_of_a_parameter_may_be_a_constant() -> None:
    source = (
        "STYLES = ['short']\n@conure.program\ndef shop(styles: list = STYLES):\n    yield styles"
    )
    assert compiled(source).variables["styles"].default == ["short"]
    error = error_of(source.replace("styles: list", "STYLES: list"))
    assert error.message.endswith("`STYLES` is an input and a constant: rename one of them")


# --- calls ------------------------------------------------------------------------------------


def test_the_key_context_of_a_message_means_content() -> None:
    nodes = nodes_of("yield llm_chat([{'role': 'user', 'context': 'hi'}])['context']")
    assert nodes["answer"]["messages"] == [{"role": "user", "content": "hi"}]


def test_options_go_to_the_output_or_to_the_node() -> None:
    nodes = nodes_of(
        "answer = llm_chat('small', [user('a')], temperature=0, stop='.', timeout=3, retries=2)\n"
        "yield answer"
    )
    answer = nodes["answer"]
    assert answer["output"] == {
        "variable": "answer", "temperature": 0, "stop": ["."], "as": "message",
    }  # fmt: skip
    assert (answer["model"], answer["timeout_s"], answer["retries"]) == ("small", 3, 2)


def test_a_call_may_name_several_models() -> None:
    nodes = nodes_of("models = ['a', 'b']\nx = gen('p', model=models)\nyield x")
    assert nodes["x"]["model"] == ["a", "b"]


def test_f_strings_become_segments() -> None:
    nodes = nodes_of("a = gen('x')\nb = gen(f'Sum up {a}: ')\nyield b")
    assert nodes["b"]["prompt"][:3] == [{"text": "Sum up "}, {"input": "a"}, {"text": ": "}]


def test_functions_of_the_server_take_positional_and_named_arguments() -> None:
    nodes = nodes_of("x = lookup('a', limit=2)\ny = json.parse(text='1')\nyield [x, y]")
    assert nodes["x"]["args"] == {"key": "a", "limit": 2}
    assert nodes["y"]["function"] == "json.parse"


def test_client_steps_have_names_and_arguments() -> None:
    nodes = nodes_of("stock = client('stock', of='tea', timeout=9)\nyield stock")
    stock = nodes["stock"]
    assert (stock["name"], stock["args"], stock["timeout_s"]) == ("stock", {"of": "tea"}, 9)


def test_a_semantic_function_is_a_prompt() -> None:
    source = '''
def write(task, style='short'):
    """Write {{task}}, {{style}}.
    Code: {{name=code, max_tokens=9}} Test: {{name=test, end=<|e|>}}"""

code, test = write('a sort')
yield {'code': code, 'test': test}
'''
    write = nodes_of(source)["write"]
    assert write["prompt"] == [
        {"text": "Write a sort, short.\nCode: "},
        {"output": "code_2", "max_tokens": 9},
        {"text": " Test: "},
        {"output": "test_2", "stop": ["<|e|>"]},
    ]


def test_an_output_parameter_is_an_output() -> None:
    source = '''
def write(task, code: Output(max_tokens=9, temperature=0)):
    """Write {{task}}: {{code}}"""

yield write('a sort')
'''
    (node,) = [each for each in nodes_of(source).values() if each["op"] == "generate"]
    assert node["prompt"][-1]["max_tokens"] == 9


def test_a_second_slot_of_an_output_parameter_reads_the_output() -> None:
    source = '''
def write(task, code: Output(max_tokens=9)):
    """Write {{task}}: {{code}} Test {{code}}: {{name=test}}"""

code, test = write('a sort')
yield {'code': code, 'test': test}
'''
    prompt = nodes_of(source)["write"]["prompt"]
    assert [each["output"] for each in prompt if "output" in each] == ["code_2", "test_2"]
    assert [each["input"] for each in prompt if "input" in each] == ["code_2"]


@pytest.mark.parametrize(
    ("parameters", "text", "words"),
    [
        ("code: Output(200)", "{{code}}", "the options of `Output` have names"),
        ("code: Output(**{'max_tokens': 9})", "{{code}}", "`**` is not allowed"),
        ("code: Output", "{{name=a}}", "the text of `f` has no slot {{code}}"),
        ("", "{{name=a, model='x'}} {{name=b, model='y'}}", "one context has one `model`"),
        ("", "{{name=a}} {{typo}}", "`typo` is neither a parameter nor an output"),
        ("", "{{name=a}} {{name=a}}", "a parameter or an output has the name `a` already"),
        ("a: Output", "{{a}} {{name=a}}", "a parameter or an output has the name `a` already"),
        ("a=1", "{{a}} {{name=a}}", "a parameter or an output has the name `a` already"),
    ],
)
def test_wrong_outputs_of_a_function_are_refused(parameters: str, text: str, words: str) -> None:
    source = f'def f({parameters}):\n    """{text}"""\nyield f()'
    assert words in error_of(source).message


@pytest.mark.parametrize(
    ("parameters", "arguments", "words"),
    [
        ("x", "'a', 'b'", "`f` takes 1 argument, got 2"),
        ("x, *, y", "'a', 'b'", "`f` takes 1 positional argument, got 2"),
        ("x, /", "", "`f` needs an argument `x`"),
        ("x, /", "x='a'", "`x` cannot be named in a call"),
        ("x", "'a', x='b'", "`x` is given twice"),
        ("x", "'a', y='b'", "`f` has no parameter `y`"),
        ("x", "**{'x': 'a'}", "`**` is not allowed"),
    ],
)
def test_wrong_arguments_of_a_function_are_refused(
    parameters: str, arguments: str, words: str
) -> None:
    assert words in error_of(f"def f({parameters}):\n    return x\nyield f({arguments})").message


def test_a_default_has_the_value_at_the_definition() -> None:
    source = "n = 1\ndef f(x, k=n):\n    return [x, k]\nn = 2\nyield f(0)"
    (node,) = nodes_of(source).values()
    assert node["value"] == [0, 1]


def test_options_of_outputs_go_to_the_call() -> None:
    text = "{{name=a, timeout=5, model='small'}} {{name=b, retries=1}}"
    nodes = nodes_of(f'def f():\n    """{text}"""\nyield f(timeout=7)')
    f = nodes["f"]
    assert (f["timeout_s"], f["retries"], f["model"]) == (7, 1, "small")


@pytest.mark.parametrize(
    ("slot", "call", "expected"),
    [
        ("max_tokens=5", "max_tokens=9", {"max_tokens": 9}),
        ("max_tokens=5, seed=1", "max_tokens=9", {"max_tokens": 9, "seed": 1}),
        ("max_tokens=5", "max_tokens=None", {"max_tokens": 5}),
        ("type=int", "type=bool", {"constraint": {"type": "bool"}}),
        ("stop='a'", "stop=['b']", {"stop": ["b"]}),
        ("end=<|e|>, stop='a'", "stop='b'", {"stop": ["<|e|>", "b"]}),
    ],
)
def test_options_of_a_call_replace_those_of_slots(
    slot: str, call: str, expected: dict[str, Any]
) -> None:
    nodes = nodes_of(f'def f():\n    """{{{{name=a, {slot}}}}}"""\nyield f({call})')
    assert nodes["f"]["prompt"] == [{"output": "a", **expected}]


@pytest.mark.parametrize(
    ("parameters", "arguments"), [("a: Output(type=int)", ""), ("a: Output", "type=int")]
)
def test_the_type_of_an_output_is_a_name(parameters: str, arguments: str) -> None:
    nodes = nodes_of(f'def f({parameters}):\n    """{{{{a}}}}"""\nyield f({arguments})')
    assert nodes["f"]["prompt"] == [{"output": "a", "constraint": {"type": "int"}}]


@pytest.mark.parametrize(
    ("option", "words"), [("stream=True", "cannot be a stream"), ("tools=[1]", "use `llm_chat`")]
)
def test_options_that_an_output_of_a_text_lacks_are_refused(option: str, words: str) -> None:
    for source in (
        f'def f():\n    """{{{{name=a}}}}"""\nyield f({option})',
        f'def f(a: Output({option})):\n    """{{{{a}}}}"""\nyield f()',
    ):
        assert words in error_of(source).message


def test_a_list_may_be_called_list() -> None:
    nodes = nodes_of("list = ['a', 'b']\nx = gen('x', choices=list)\nyield x")
    assert nodes["x"]["prompt"][-1]["constraint"] == {"choices": ["a", "b"]}


def test_a_function_in_a_comprehension_reads_the_names_of_the_program() -> None:
    f = "topic = 'tea'\ndef f(x):\n    return gen(f'{topic} {x}')\n"
    nodes = nodes_of(f"{f}y = [f(topic) for topic in ['a', 'b']]\nyield y")
    assert nodes["text"]["prompt"][:2] == [{"text": "tea "}, {"input": nodes["y"]["as"]}]


@pytest.mark.parametrize(
    ("call", "outputs"), [("f()", ["x"]), ("if a:\n    f()", []), ("for _ in [1]:\n    f()", [])]
)
def test_a_yield_of_a_function_that_is_called_outside_of_branches_makes_an_output(
    call: str, outputs: list[str]
) -> None:
    source = f"a = gen('A')\ndef f():\n    x = gen('x')\n    yield x\n{call}"
    assert compiled(source).outputs == outputs


# --- control flow -----------------------------------------------------------------------------


def test_calls_of_a_semantic_function_have_their_own_arguments_and_outputs() -> None:
    nodes = nodes_of(
        """
def name_it(thing):
    \"\"\"A {{thing}} {{thing}}: {{name=found, stop=['.']}}\"\"\"

a = name_it("cat")
b = name_it("dog", max_tokens=9)
yield {"a": a, "b": b}
"""
    )
    first, second = nodes["name_it"]["prompt"], nodes["name_it_2"]["prompt"]
    assert [each.get("text") for each in first] == ["A cat cat: ", None]
    assert [each.get("text") for each in second] == ["A dog dog: ", None]
    assert first[1] == {"output": "a", "stop": ["."]}
    assert second[1] == {"output": "b", "stop": ["."], "max_tokens": 9}


def test_a_branch_of_a_function_does_not_assign_a_name_of_the_program() -> None:
    error = error_of(
        """
x = "outside"
q: bool

def pick(q):
    if q:
        x = "inside"
    return x

yield pick(q)
"""
    )
    assert error.code == "language.maybe_unassigned"
    assert error.line == 8


def test_a_nested_branch_keeps_what_the_branches_around_it_assigned() -> None:
    nodes = nodes_of(
        """
q: bool
if q:
    x = "outer"
    if not q:
        x = "inner"
else:
    x = "other"
yield x
"""
    )
    assert nodes["yield"]["value"] == {"var": "x"}
    assert "x" in nodes["branch_2"]["merge"]


def test_yields_of_a_job_are_ordered_and_jobs_are_not() -> None:
    source = """
yield {'a': 1}
with job(name='left'):
    yield {'b': 2}
    yield {'c': 3}
with job(name='right'):
    yield {'d': 4}
yield {'e': 5}
"""
    nodes = nodes_of(source)
    after = {name: node.get("after", []) for name, node in nodes.items()}
    assert after == {
        "yield": [],
        "yield_2": ["yield"],
        "yield_3": ["yield_2"],
        "yield_4": ["yield"],
        "yield_5": ["yield"],
    }


def test_statements_follow_the_wait_in_a_conditional_expression() -> None:
    function = "def f(q):\n    a = gen(q)\n    wait(a)\n    return a\n"
    nodes = nodes_of(f"c: bool\n{function}x = f('p') if c else ''\nb = gen('y')\nyield [x, b]")
    assert nodes["b"]["after"] == ["x"]


def test_a_comprehension_refuses_a_yield_in_a_condition() -> None:
    function = "def f(q):\n    a = gen(q)\n    yield {'a': a}\n    return a\n"
    error = error_of(f"xs: list\n{function}yield [f(x) if x else '' for x in xs]")
    assert "write a `for` loop" in error.message


def test_calls_start_without_waiting_for_yields() -> None:
    nodes = nodes_of("a = gen('x')\nyield a\nb = gen('y')\nyield b")
    assert "after" not in nodes["b"]


def test_calls_after_a_wait_start_after_it() -> None:
    nodes = nodes_of("a = gen('x')\nwait a\nb = gen('y')\nyield b")
    assert nodes["b"]["after"] == ["wait"]


def test_a_wait_may_have_a_timeout_and_need_one_value_only() -> None:
    nodes = nodes_of("a = gen('x')\nb = gen('y')\nwait(a, b, any=True, timeout=2)\nyield {'a': a}")
    assert (nodes["wait"]["mode"], nodes["wait"]["timeout_s"]) == ("any", 2)


def test_a_wait_for_a_job_includes_the_jobs_in_it() -> None:
    jobs = "with job() as outer:\n    with job():\n        x = gen('x')\n"
    nodes = nodes_of(f"{jobs}wait outer\nyield 1")
    assert nodes["join"]["after"] == ["x"]
    assert nodes["yield"]["after"] == ["wait"]


def test_a_wait_for_many_nodes_of_jobs_joins_them_in_parts() -> None:
    body = "\n".join("    x = gen('x')" for _ in range(100))
    calls = "\n".join("    f()" for _ in range(11))
    nodes = nodes_of(f"def f():\n{body}\nwith job() as many:\n{calls}\nwait many\nyield 1")
    assert nodes["join_3"]["after"] == ["join", "join_2"]
    assert [len(nodes[name]["after"]) for name in ("join", "join_2")] == [1_000, 100]


def test_a_wait_for_jobs_may_have_a_timeout_and_need_one_only() -> None:
    jobs = "with job() as a:\n    x = gen('x')\nwith job() as b:\n    y = gen('y')\n"
    nodes = nodes_of(f"{jobs}wait(a, b, any=True, timeout=2)\nyield 1")
    assert (nodes["wait"]["mode"], nodes["wait"]["timeout_s"]) == ("any", 2)
    assert [nodes[name]["after"] for name in nodes["wait"]["variables"]] == [["x"], ["y"]]


def test_a_race_kills_the_losers() -> None:
    nodes = nodes_of("a = gen('x')\nb = gen('y')\nwinner = race(a, b)\nyield winner")
    assert nodes["losers"]["targets"] == ["a", "b"]
    assert nodes["winner"]["after"] == ["losers"]


@pytest.mark.parametrize("effect", ["right.kill()", "if a:\n        right.kill()", "wait right"])
def test_a_job_that_is_defined_further_down_is_refused(effect: str) -> None:
    left = f"with job() as left:\n    a = gen('A')\n    wait a\n    {effect}\n"
    right = "with job() as right:\n    b = gen('B')\n    wait b\n    left.kill()\n"
    message = error_of(f"{left}{right}yield a").message
    assert "`right` is not defined: the job is defined further down" in message
    assert "`right.kill()` and `wait right` must stand below it" in message


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("max(a, 'b')", "`max` takes 1 argument, got 2: write `max([a, b])`"),
        ("a.split()", "`split` takes 1 argument, got 0: write `text.split(' ')`"),
        ("range()", "`range` takes 1 to 3 arguments, got 0: write `range(3)`"),
    ],
)
def test_a_wrong_number_of_arguments_is_refused_with_an_example(call: str, expected: str) -> None:
    assert error_of(f"a = gen('x')\nyield {call}").message.endswith(expected)


def test_the_examples_of_functions_compile() -> None:
    names = "text = gen('t')\nvalue, items, a, b = text, [text], text, text\n"
    for function in (*FUNCTIONS.values(), *METHODS.values()):
        compiled(f"{names}yield {{'x': {function.example}}}")


def test_a_kill_at_the_start_is_refused() -> None:
    assert "as soon as it starts" in error_of("a = gen('x')\na.kill()\nyield 1").message


def test_statements_after_a_break_run_only_without_it() -> None:
    source = """
found = ''
for word in ['a', 'b', 'c']:
    answer = gen(word)
    if answer.contains('x'):
        break
    found = found + answer
yield found
"""
    nodes = nodes_of(source)
    assert [node["op"] for node in nodes["branch"]["then"]] == ["expr"]
    assert nodes["branch"]["then"][0]["expr"] is True
    assert nodes["branch"]["else"]
    assert nodes["loop"]["max_iter"] == 3
    assert "until" in nodes["loop"]


def test_a_comprehension_with_calls_is_a_map_and_without_is_an_expression() -> None:
    nodes = nodes_of(
        "names = parse_json(gen('n'))\n"
        "texts = [gen(f'About {name}') for name in names[:4] if name != '']\n"
        "sizes = [len(text) for text in texts]\n"
        "yield {'texts': texts, 'sizes': sizes}"
    )
    assert nodes["texts"]["max_width"] == 4
    assert "each" in nodes["sizes"]["expr"]


def test_a_conditional_expression_with_calls_runs_one_of_them() -> None:
    nodes = nodes_of("a = gen('x')\nb = gen('y') if a == 'z' else 'none'\nyield b")
    assert [node["op"] for node in nodes["b"]["then"]] == ["generate"]


@pytest.mark.parametrize("text", ["draft", "terse", ""])
@pytest.mark.parametrize(
    "source", ["if style:\n    x = gen('a')\nelse:\n    x = ''", "x = gen('a') if style else ''"]
)
def test_a_text_as_condition_is_no_name(text: str, source: str) -> None:
    nodes = nodes_of(f"style = '{text}'\ndraft: str\n{source}\nyield {{'x': x}}")
    (cond,) = (node["cond"] for node in nodes.values() if node["op"] == "if")
    assert cond == {"lit": text}


@pytest.mark.parametrize(
    "source", ["for x in names:\n    yield x", "yield [gen(x) for x in names]"]
)
def test_a_text_as_list_is_no_name(source: str) -> None:
    function = "def pair():\n    return ['draft', 'b']\n"
    nodes = nodes_of(f"{function}draft: list\nnames, b = pair()\n{source}")
    (items,) = (node["items"] for node in nodes.values() if node["op"] in ("map", "loop"))
    assert items == {"lit": "draft"}


def test_handlers_have_codes() -> None:
    nodes = nodes_of(
        "try:\n    x = parse_json(gen('a'))\nexcept (ValueError, Timeout):\n    x = 0\nyield x"
    )
    assert {"expr.json", "node.timeout"} <= set(nodes["attempt"]["handlers"][0]["codes"])


@pytest.mark.parametrize("kinds", ["(Timeout, Exception)", "(Exception, Timeout)"])
def test_kinds_of_which_one_is_any_handle_any_failure(kinds: str) -> None:
    nodes = nodes_of(f"try:\n    x = gen('a')\nexcept {kinds}:\n    x = ''\nyield x")
    assert "codes" not in nodes["attempt"]["handlers"][0]


def test_no_kind_is_refused() -> None:
    error = error_of("try:\n    x = gen('a')\nexcept ():\n    x = ''\nyield x")
    assert "write `except Kind:`" in error.message


def test_the_value_of_a_returned_call_is_the_result() -> None:
    assert compiled("text: str\nreturn gen(f'{text}')").outputs == ["result"]
    assert compiled("text: str\nsummary = gen(f'{text}')\nreturn summary").outputs == ["summary"]


def test_recursion_is_refused() -> None:
    error = error_of("def f(x):\n    return f(x)\nyield f(1)")
    assert (error.code, error.status) == ("language.recursion", 400)


def test_an_error_of_the_graph_gets_the_line_of_its_node() -> None:
    program = compile_source("a = gen('x')\nb = gen('y', timeout=-1)\nyield [a, b]")
    with pytest.raises(ProgramError) as caught:
        revalidate(Submission(program=program))
    located = locate(caught.value, program)
    assert isinstance(located, LanguageError)
    assert located.line == 2
    assert located.message == "line 2, column 1: Expected `float` > 0.0 at `timeout_s`"


# --- what the language lacks ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("while True:\n    pass", "for _ in range(10)"),
        ("import conure", "Python runs files that use `conure.program`"),
        ("x = lambda: 1", "write a `def`"),
        ("x = {1, 2}", "write a list"),
        ("x = 'a'.format(1)\nyield x", "write an f-string"),
        ("x = f'{1:>3}'", "formats in f-strings"),
        ("x = 2 ** 3", "write the product"),
        ("x = 'a' % 1", "`%` needs numbers"),
        ("x = 'a' * 9", "`*` needs numbers"),
        ("x = 'a' + 1", "write an f-string"),
        ("x = [1] + 2", "put the element into a list"),
        ("print('a')", "yield {'name': value}"),
        ("x = a.b", "attributes are not supported"),
        ("x = (1).__class__", "attributes are not supported"),
        ("x = 'a'.__len__()", "unknown method `__len__`"),
        ("[c for c in [1]][0].__class__.__bases__()", "attributes are not supported"),
        ("raise ValueError('a')", "fail('...')"),
        ("x = 99999999999999999999", "64 bits"),
        ("gen('a', temperatur=1)", "did you mean `temperature`?"),
        ("x = gen('a', temperature=float(gen('b')))", "write it as a literal"),
        ("x = 1\n  y = 2", "Python's syntax"),
        ("x = gen('a', n=3)", "[gen(...) for _ in range(3)]"),
        ("with job(budget=9):\n    yield gen('a')", "`max_tokens`"),
        ("try:\n    x = gen('a')\nexcept Killed:\n    x = ''\nyield x", "first(variable, other)"),
        ("try:\n    x = 1\nexcept ValueError:\n    x = 2\nfinally:\n    y = 1", "after it"),
        ("x = gen('a', stream=True)\nfor i, c in enumerate(x):\n    yield c", "has no indices"),
        ("x = 1", "gives no result"),
    ],
)
def test_an_error_contains_what_to_write_instead(source: str, message: str) -> None:
    error = error_of(source)
    assert message in error.message
    assert error.path == f"source:{error.line}:{error.column}"


def test_columns_count_characters() -> None:
    assert (error_of("x = ['茶茶', nothing]").line, error_of("x = ['茶茶', nothing]").column) == (
        1,
        12,
    )


def test_the_essay_s_spelling_inside_of_a_string_is_text() -> None:
    nodes = nodes_of('x = gen("""\nwait a, b\nStartNewJob:\n""")\nyield x')
    assert nodes["x"]["prompt"][0]["text"] == "\nwait a, b\nStartNewJob:\n"
