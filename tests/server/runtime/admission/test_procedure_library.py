"""Stored procedures: versions, aliases, calls, restarts and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from conure.server.program.errors import ConflictError, ConureError, NotFoundError, ProgramError
from conure.server.program.ir import Program as ProgramRecord
from conure.server.program.procedures import PutProcedure, RunProcedure, StoredProcedure

from ...inprocess import Program, ServerHarness, answer, expr, generate, insert, server_harness, var

SHOUT = {
    "variables": {
        "text": {"type": "string", "schema": {"maxLength": 40}},
        "mark": {"default": "!"},
    },
    "nodes": [
        {
            "id": "join",
            "op": "expr",
            "expr": {"concat": [{"var": "text"}, {"var": "mark"}]},
            "output": "loud",
        }
    ],
    "outputs": ["loud"],
}
LOUDER = {
    **SHOUT,
    "nodes": [
        {
            "id": "join",
            "op": "expr",
            "expr": {"concat": [{"var": "text"}, {"var": "mark"}, {"var": "mark"}]},
            "output": "loud",
        }
    ],
}
OUTPUT_C = {"outputs": ["c"]}


async def put(
    harness: ServerHarness, name: str, program: dict[str, Any], alias: str | None = "default"
) -> StoredProcedure:
    body = msgspec.convert({"program": program, "alias": alias}, PutProcedure)
    return await harness.executor.procedures.put(name, body, tenant=harness.tenant)


def call(reference: str, node: str = "c", **fields: Any) -> dict[str, Any]:
    return {"id": node, "op": "procedure", "procedure": reference, "output": node, **fields}


async def value(harness: ServerHarness, *nodes: dict[str, Any], output: str = "c") -> Any:
    program = await harness.submit(list(nodes), outputs=[output])
    status = await program.end()
    assert status.status == "done", status.error
    return status.variables[output].value


async def test_a_procedure_is_called_as_a_program_and_from_a_program(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        stored = await put(harness, "shout", SHOUT)
        assert stored.aliases == ["default"]
        assert list(stored.parameters) == ["text", "mark"]
        assert await value(harness, call("shout", args={"text": "hi"})) == "hi!"
        assert await value(harness, call(f"shout@{stored.version}", args={"text": "hi"})) == "hi!"
        run = RunProcedure(inputs={"text": "yes", "mark": "?"})
        accepted, _ = await harness.executor.procedures.run(
            "shout", run, tenant=harness.tenant, idempotency_key=None
        )
        got = await harness.executor.get(accepted.id, "loud", tenant=harness.tenant, wait_s=20)
        assert got.value == "yes?"


async def test_an_alias_moves_only_to_an_equal_signature(tmp_path: Path) -> None:
    other = {**SHOUT, "outputs": ["loud", "text"]}
    async with server_harness(tmp_path) as harness:
        first = await put(harness, "shout", SHOUT, "prod")
        second = await put(harness, "shout", LOUDER, "prod")
        assert await value(harness, call("shout:prod", args={"text": "a"})) == "a!!"
        with pytest.raises(ConflictError) as caught:
            await put(harness, "shout", other, "prod")
        assert caught.value.code == "procedure.signature"
        third = await put(harness, "shout", other, None)
        tenant = harness.tenant
        procedures = harness.executor.procedures
        with pytest.raises(ConflictError):
            await procedures.put_alias("shout", "prod", third.version, tenant=tenant)
        back = await procedures.put_alias("shout", "prod", first.version, tenant=tenant)
        assert back.aliases == ["prod"]
        assert await value(harness, call("shout:prod", args={"text": "a"})) == "a!"
        listed = await harness.executor.procedures.list_all(tenant=tenant)
        assert {each.version for each in listed} == {first.version, second.version, third.version}


async def test_a_repeated_run_starts_one_program_wherever_its_alias_is_by_then(
    tmp_path: Path,
) -> None:
    async with server_harness(tmp_path) as harness:
        tenant, procedures = harness.tenant, harness.executor.procedures

        async def run(reference: str, text: str) -> tuple[str, bool]:
            body = RunProcedure(inputs={"text": text})
            accepted, is_replay = await procedures.run(
                reference, body, tenant=tenant, idempotency_key="k"
            )
            assert accepted.outputs == ["loud"]
            return accepted.id, is_replay

        await put(harness, "shout", SHOUT, "prod")
        program, _ = await run("shout:prod", "a")
        await put(harness, "shout", LOUDER, "prod")
        assert await run("shout:prod", "a") == (program, True)
        await procedures.remove_alias("shout", "prod", tenant=tenant)
        assert await run("shout:prod", "a") == (program, True)
        for reference, text in (("shout:prod", "b"), ("shout", "a")):
            with pytest.raises(ConflictError):
                await run(reference, text)


async def test_procedures_survive_a_restart_and_programs_keep_their_version(tmp_path: Path) -> None:
    waiting = {"id": "ask", "op": "client", "name": "ask", "output": "word"}
    async with server_harness(tmp_path) as harness:
        await put(harness, "shout", SHOUT)
        program = await harness.submit(
            [waiting, call("shout", args={"text": var("word")})], outputs=["c"]
        )
        await program.event("client.requested")
        await put(harness, "shout", LOUDER)
    async with server_harness(tmp_path) as harness:
        assert await value(harness, call("shout", args={"text": "b"})) == "b!!"
        restarted = Program(harness, program.id)
        await restarted.event("client.requested")
        await restarted.put("word", "a")
        assert await restarted.value("c") == "a!"


async def test_a_version_is_removed_once_no_alias_names_it(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        procedures, tenant = harness.executor.procedures, harness.tenant
        stored = await put(harness, "shout", SHOUT)
        louder = await put(harness, "shout", LOUDER, "next")
        version = f"shout@{stored.version}"
        await put(harness, "caller", {"nodes": [call("shout", args={"text": "x"})]} | OUTPUT_C)
        with pytest.raises(ConflictError, match="the aliases default name") as refused:
            await procedures.remove(version, tenant=tenant)
        assert refused.value.code == "procedure.in_use"
        waiting = {"id": "who", "op": "client", "name": "who", "output": "who"}
        running = await harness.submit(
            [waiting, call("shout", args={"text": {"var": "who"}})], outputs=["c"]
        )
        requested = await running.event("client.requested")
        await procedures.remove_alias("shout", "default", tenant=tenant)
        await procedures.remove(version, tenant=tenant)
        for reference in ("shout", version):
            with pytest.raises(NotFoundError):
                await procedures.find(reference, tenant=tenant)
        with pytest.raises(NotFoundError):
            await procedures.remove_alias("shout", "default", tenant=tenant)
        await running.put("who", "hi", requested.data["request_id"])
        assert await running.value("c") == "hi!"
        assert await value(harness, call("caller")) == "x!"
        again = await put(harness, "shout", SHOUT)
        assert again.version == stored.version
        await procedures.remove_alias("shout", "default", tenant=tenant)
        await procedures.remove(version, tenant=tenant)
    async with server_harness(tmp_path) as harness:
        listed = await harness.executor.procedures.list_all(tenant=harness.tenant)
        assert [each.version for each in listed if each.name == "shout"] == [louder.version]


async def test_a_stored_procedure_keeps_the_version_of_what_it_calls(tmp_path: Path) -> None:
    outer = {
        "variables": {"word": {}},
        "nodes": [call("shout", "inner", args={"text": var("word")})],
        "outputs": ["inner"],
    }
    async with server_harness(tmp_path) as harness:
        await put(harness, "shout", SHOUT)
        await put(harness, "outer", outer)
        await put(harness, "shout", LOUDER)
        assert await value(harness, call("outer", args={"word": "a"})) == "a!"


async def test_calls_in_maps_run_for_every_item(tmp_path: Path) -> None:
    inner = call("shout", "d", args={"text": var("it")})
    each = {
        "id": "m",
        "op": "map",
        "items": {"lit": ["a", "b"]},
        "as": "it",
        "body": [inner],
        "collect": {"all": "d"},
    }
    async with server_harness(tmp_path) as harness:
        await put(harness, "shout", SHOUT)
        assert await value(harness, each, output="all") == ["a!", "b!"]


async def test_the_calls_of_a_procedure_share_prompts_with_their_caller(tmp_path: Path) -> None:
    judge = {
        "variables": {"page": {}},
        "nodes": [generate("g", "Shared. " * 40, insert("page"), " Judge: ", writes="verdict")],
        "outputs": ["verdict"],
    }
    nodes = [
        generate("own", "Shared. " * 40, insert("doc"), " Digest: ", writes="digest"),
        call("judge", args={"page": var("doc")}),
    ]
    async with server_harness(tmp_path) as harness:
        await put(harness, "judge", judge)
        program = await harness.submit(nodes, inputs={"doc": "d" * 64}, outputs=["digest", "c"])
        status = await program.end()
    receipt = msgspec.to_builtins(status.receipt)["prompt_tokens"]
    assert receipt["logical"] - receipt["computed"] > receipt["logical"] / 3


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"text": 3}, "variable.type"),
        ({"text": "x" * 41}, "variable.schema"),
    ],
)
async def test_an_argument_that_does_not_fit_fails_the_call(
    tmp_path: Path, args: dict[str, Any], code: str
) -> None:
    async with server_harness(tmp_path) as harness:
        await put(harness, "shout", SHOUT)
        program = await harness.submit([call("shout", args=args)], outputs=["c"])
        status = await program.end()
    assert status.error
    assert status.error.code == code


@pytest.mark.parametrize(
    ("nodes", "error", "path"),
    [
        ([call("gone")], NotFoundError, "program.nodes[0].procedure"),
        ([call("shout:gone")], NotFoundError, "program.nodes[0].procedure"),
        ([call("shout")], ProgramError, "program.nodes[0].args"),
        ([call("shout", body=[expr("x", 1)])], ProgramError, "program.nodes[0].body"),
    ],
)
async def test_a_call_that_cannot_work_is_refused_at_submission(
    tmp_path: Path, nodes: list[Any], error: type[ConureError], path: str
) -> None:
    async with server_harness(tmp_path) as harness:
        await put(harness, "shout", SHOUT)
        with pytest.raises(error) as caught:
            await harness.submit(nodes, outputs=["c"])
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("shout:prd", "procedure `shout` has no alias `prd`; it has `default`, `prod`"),
        (f"shout@{'0' * 32}", f"procedure `shout` has no version `{'0' * 32}`; it has `"),
        ("quiet", "procedure `quiet` has no alias `default`; it has no alias"),
        ("shuot", "there is no procedure `shuot`: did you mean `shout`?"),
        ("other:prod", "there is no procedure `other`: store it by PUT /v1/procedures/other"),
    ],
)
async def test_an_unknown_reference_is_refused_with_what_there_is(
    tmp_path: Path, reference: str, words: str
) -> None:
    async with server_harness(tmp_path) as harness:
        await put(harness, "shout", SHOUT)
        await put(harness, "shout", SHOUT, "prod")
        await put(harness, "quiet", SHOUT, None)
        with pytest.raises(NotFoundError) as caught:
            await harness.submit([call(reference)], outputs=["c"])
    assert caught.value.message.startswith(words)
    assert caught.value.path == "program.nodes[0].procedure"


async def test_a_faulty_program_is_not_stored(tmp_path: Path) -> None:
    faulty = {**SHOUT, "outputs": ["quiet"]}
    async with server_harness(tmp_path) as harness:
        for program in (faulty, {**SHOUT, "outputs": []}):
            with pytest.raises(ProgramError):
                await put(harness, "shout", program)
        with pytest.raises(NotFoundError):
            await harness.executor.procedures.find("shout", tenant=harness.tenant)


async def test_another_tenant_does_not_see_a_procedure(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        await put(harness, "shout", SHOUT)
        with pytest.raises(NotFoundError):
            await harness.executor.procedures.find("shout", tenant="other")


async def test_a_kill_and_a_failure_inside_end_the_call(tmp_path: Path) -> None:
    slow = {
        "nodes": [{"id": "ask", "op": "client", "name": "ask", "output": "never"}],
        "outputs": ["never"],
    }
    failing = {"nodes": [expr("f", {"fail": "no"}, "x")], "outputs": ["x"]}
    async with server_harness(tmp_path) as harness:
        await put(harness, "slow", slow)
        await put(harness, "failing", failing)
        nodes = [
            call("slow"),
            expr("now", 1, "one"),
            {"id": "stop", "op": "kill", "targets": ["c"], "after": ["now"]},
        ]
        killed = await (await harness.submit(nodes, outputs=["one"])).end()
        assert killed.nodes["ask__c"].status == "killed"
        failed = await (await harness.submit([call("failing")], outputs=["c"])).end()
    assert failed.error
    assert failed.error.code == "expr.fail"


async def test_text_and_graph_give_the_same_version(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        text = "text: str\nsummary = gen(f'Sum: {text}', max_tokens=8)\nreturn summary"
        body = PutProcedure(source=text)
        stored = await harness.executor.procedures.put("sum", body, tenant=harness.tenant)
        assert list(stored.parameters) == ["text"]
        assert list(stored.results) == ["summary"]
        graph = PutProcedure(program=stored.program)
        again = await harness.executor.procedures.put("sum", graph, tenant=harness.tenant)
        assert again.version == stored.version
        found = await value(harness, call("sum", args={"text": "tea"}))
        assert found == answer("Sum: tea")[:8]


async def test_fault_in_a_text_has_its_line(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        procedures = harness.executor.procedures
        for text, path in (
            ("x = 1\nreturn unknown", "source:2:8"),
            ("x: str\n\nreturn call('missing', a=x)", "source:3:"),
        ):
            body = PutProcedure(source=text)
            with pytest.raises(ConureError) as refused:
                await procedures.put("bad", body, tenant=harness.tenant)
            assert (refused.value.path or "").startswith(path), refused.value


async def test_procedure_has_a_graph_or_a_text(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        graph = msgspec.convert(SHOUT, ProgramRecord)
        for body in (PutProcedure(), PutProcedure(program=graph, source="return 1")):
            with pytest.raises(ProgramError, match="either `program`"):
                await harness.executor.procedures.put("both", body, tenant=harness.tenant)
