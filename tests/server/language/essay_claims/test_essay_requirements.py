"""Requirements and wishes of the essay, as behaviour of the server (R2, R5, R6, W5, W6, W8, C6)."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import UNSET

from conure.server.language.compiler import compile_source
from conure.server.program.errors import NotFoundError, ProgramError
from conure.server.program.ir import GenerateNode
from conure.server.program.procedures import PutProcedure
from conure.server.program.status import ProgramStatus, Receipt

from ...inprocess import Program, server_harness


def receipt_of(status: ProgramStatus) -> Receipt:
    assert isinstance(status.receipt, Receipt)
    return status.receipt


async def order_of(program: Program, *types: str) -> list[tuple[str, str]]:
    """Return the events of some types with the node or the variable that they are about."""
    return [
        (each.type, each.data.get("node") or each.data["variable"])
        for each in await program.events()
        if each.type in types
    ]


async def done(program: Program) -> ProgramStatus:
    status = await program.end()
    assert status.status == "done", status.error
    return status


# --- R2: the server chooses the plan from the described dependencies ----------------------------


async def test_calls_start_in_the_order_of_their_dependencies_not_of_the_text(
    tmp_path: Path,
) -> None:
    source = """with job():
    joined = gen(f"{left} and {right}. ", max_tokens=4)
    yield joined
with job():
    left = gen(f"{root} left. ", max_tokens=40, ignore_eos=True)
with job():
    right = gen(f"{root} right. ", max_tokens=4)
with job():
    root = client("root")"""
    async with server_harness(tmp_path) as harness:
        program = await harness.submit_source(source)
        await program.put("root", "The root of all. ")
        order = await order_of(program, "node.started", "variable.committed")
        status = await done(program)
    place = {each: number for number, each in enumerate(order)}
    for call in ("left", "right"):
        assert place["variable.committed", "root"] < place["node.started", call]
        assert place["variable.committed", call] < place["node.started", "joined"]
    # Neither waits for the other, and the server computes what they share once.
    assert place["node.started", "right"] < place["variable.committed", "left"]
    assert receipt_of(status).prompt_tokens.computed < receipt_of(status).prompt_tokens.logical


async def test_one_description_of_the_dependencies_is_one_plan_however_it_is_written(
    tmp_path: Path,
) -> None:
    one = "a = gen('A', max_tokens=4)\nb = gen('B', max_tokens=4)\nyield [a, b, gen(a + b)]"
    other = "b = gen('B', max_tokens=4)\na = gen('A', max_tokens=4)\nyield [a, b, gen(a + b)]"
    async with server_harness(tmp_path) as harness:
        yields = []
        for source in (one, other):
            program = await harness.submit_source(source)
            yields += [
                each.data["value"] for each in await program.events() if each.type == "yield"
            ]
            await done(program)
    assert yields[0] == yields[1]


# --- R5: the text is sent each time, storing it is a separate step -------------------------------


async def test_a_text_runs_on_a_server_that_knows_nothing_of_it_and_leaves_nothing_there(
    tmp_path: Path,
) -> None:
    source = "answer = gen('Tea is ', max_tokens=8)\nreturn answer"
    values = []
    for folder in ("one", "two"):
        async with server_harness(tmp_path / folder) as harness:
            for _ in range(2):
                program = await harness.submit_source(source)
                values.append(await program.value("answer"))
                assert receipt_of(await done(program)).blocks_held == 0
            assert await harness.executor.procedures.list_all(tenant=harness.tenant) == []
    assert len(set(map(str, values))) == 1


async def test_a_name_can_be_called_only_after_its_text_was_stored(tmp_path: Path) -> None:
    caller = "yield call('drink', of='tea')"
    async with server_harness(tmp_path) as harness:
        with pytest.raises((ProgramError, NotFoundError)) as caught:
            await harness.submit_source(caller)
        assert "drink" in str(caught.value)
        body = PutProcedure(source="of: str\nreturn gen(f'About {of}: ', max_tokens=8)")
        await harness.executor.procedures.put("drink", body, tenant=harness.tenant)
        await done(await harness.submit_source(caller))


# --- R6: the whole logic is known before the first call -----------------------------------------


async def test_all_calls_are_known_before_the_first_has_a_value_and_need_no_further_request(
    tmp_path: Path,
) -> None:
    source = """start = client("start")
first_call = gen(f"{start} First. ", max_tokens=4)
if first_call.contains("no such word"):
    taken = gen(f"{first_call} A. ", max_tokens=4)
else:
    taken = gen(f"{first_call} B. ", max_tokens=4)
last_call = gen(f"{taken} Last. ", max_tokens=4)
yield {"last": last_call}"""
    async with server_harness(tmp_path) as harness:
        program = await harness.submit_source(source)
        await program.event("client.requested")
        status = await program.status()
        assert {"first_call", "branch", "last_call"} <= status.nodes.keys()
        assert not any(each.status == "done" for each in status.nodes.values())
        await program.put("start", "Go. ")
        # From here on the client sends nothing: a session would need a request for each call.
        status = await done(program)
        assert status.variables["last_call"].status == "done"
        assert receipt_of(status).calls == 3


# --- W6: a runtime of a language that computes ----------------------------------------------------

COMPUTED = """limit: int

def is_prime(number, smaller):
    divisors = [1 for each in smaller if number % each == 0]
    return len(divisors) == 0

primes = []
for number in range(2, 30):
    if number <= limit:
        if is_prime(number, primes):
            primes = primes + [number]
words = {"count": len(primes), "last": primes[-1]}
yield {"primes": primes, "sum": sum(primes), "words": words}"""


async def test_a_program_computes_without_any_llm_call(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        program = await harness.submit_source(COMPUTED, {"limit": 20})
        status = await done(program)
        (value,) = [each.data["value"] for each in await program.events() if each.type == "yield"]
    primes = [2, 3, 5, 7, 11, 13, 17, 19]
    assert value == {"primes": primes, "sum": 77, "words": {"count": 8, "last": 19}}
    assert receipt_of(status).calls == 0


async def test_computed_values_decide_which_calls_run_and_functions_mix_with_them(
    tmp_path: Path,
) -> None:
    async def double(number: int) -> int:
        return 2 * number

    source = """numbers = [3, 1, 2]
total = 0
for number in sorted(numbers):
    total += double(number)
answers = [gen(f"{number}: ", max_tokens=4) for number in range(total)]
yield {"total": total, "calls": len(answers)}"""
    async with server_harness(tmp_path, {"double": double}) as harness:
        program = await harness.submit_source(source)
        status = await done(program)
        (value,) = [each.data["value"] for each in await program.events() if each.type == "yield"]
    assert value == {"total": 12, "calls": 12}
    assert receipt_of(status).calls == 12


# --- W8: what outlives a program and a server -----------------------------------------------------


async def test_procedures_and_running_programs_outlive_the_server(tmp_path: Path) -> None:
    source = """draft = gen("Draft: ", max_tokens=8)
more = client("more")
yield {"text": call("polish", text=draft + more)}"""
    async with server_harness(tmp_path) as harness:
        body = PutProcedure(source="text: str\nreturn gen(f'Polish {text}: ', max_tokens=8)")
        await harness.executor.procedures.put("polish", body, tenant=harness.tenant)
        program = await harness.submit_source(source)
        draft = await program.value("draft")
        identity = program.id
    async with server_harness(tmp_path) as harness:
        program = Program(harness, identity)
        assert await program.value("draft") == draft
        await program.put("more", "!")
        status = await done(program)
        calls = [each for each in await program.events() if each.type == "node.started"]
        assert [each.data["node"] for each in calls].count("draft") == 1
        assert receipt_of(status).calls == 2
        again = await harness.submit_source("yield call('polish', text='Tea.')")
        await done(again)


async def test_variables_of_one_program_are_unknown_to_the_next(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        await done(await harness.submit_source("note = 'kept'\nyield note"))
        with pytest.raises(ProgramError) as caught:
            await harness.submit_source("yield note")
    assert caught.value.code == "language.undefined_name"


# --- C6 and W5: sequential templates, and trees ---------------------------------------------------


def test_a_template_is_one_call_after_another_in_one_context() -> None:
    template = "A: {{name=a}} B: {{name=b}} C: {{name=c}}"
    first, *others = compile_source(template, "template").nodes
    assert isinstance(first, GenerateNode)
    assert isinstance(first.prompt, list)
    assert [each.output for each in first.prompt if each.output is not UNSET] == ["a", "b", "c"]
    assert not any(isinstance(each, GenerateNode) for each in others)


async def test_a_tree_is_decoded_in_parallel_and_processed_as_a_value(tmp_path: Path) -> None:
    source = """def grow(topic):
    leaves = [gen(f"{topic}, part {part}: ", max_tokens=8) for part in ["1", "2", "3"]]
    return {"topic": topic, "leaves": leaves}

tree = [grow(topic) for topic in ["tea", "jam"]]
sizes = [len(leaf) for leaf in tree[1]["leaves"]]
longest = max(sizes)
yield {"tree": tree, "longest": longest}"""
    async with server_harness(tmp_path) as harness:
        program = await harness.submit_source(source)
        order = await order_of(program, "node.started", "variable.committed")
        status = await done(program)
        (value,) = [each.data["value"] for each in await program.events() if each.type == "yield"]
    assert [each["topic"] for each in value["tree"]] == ["tea", "jam"]
    leaves = [leaf for branch in value["tree"] for leaf in branch["leaves"]]
    assert len(leaves) == receipt_of(status).calls == 6
    assert value["longest"] == max(map(len, value["tree"][1]["leaves"]))
    # Each leaf is a call of its own.
    calls = [node for kind, node in order if kind == "node.started" and "text" in node]
    assert len(calls) == 6
