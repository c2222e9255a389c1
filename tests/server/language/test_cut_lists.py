"""A list or a choice that `max_tokens` cuts fails; the error says what was cut and what to set."""

from __future__ import annotations

from pathlib import Path

from msgspec import UNSET

from ..inprocess import Program, server_harness


async def test_a_cut_list_fails_with_what_to_set_and_without_a_partial_value(
    tmp_path: Path,
) -> None:
    async with server_harness(tmp_path) as harness:
        source = "ideas = gen('Ideas: ', type=list, max_tokens=4)\nyield {'ideas': ideas}"
        program = await harness.submit_source(source)
        status = await program.end()
        assert status.status == "failed"
        variable = status.variables["ideas"]
        assert variable.status == "failed"
        assert variable.value is UNSET
        assert variable.error is not UNSET
        assert variable.error.code == "output.incomplete"
        message = variable.error.message
        assert "output ideas was cut off by max_tokens=4 before its list was complete" in message
        assert 'raise max_tokens, or bound the list, as schema={"type": "array"' in message
        assert not [each for each in await program.events() if each.type == "yield"]


async def values_of(program: Program) -> list[object]:
    status = await program.end()
    assert status.status == "done", status.error
    return [each.data["value"] for each in await program.events() if each.type == "yield"]


async def test_what_the_error_advises_gives_a_list(tmp_path: Path) -> None:
    bounded = '{"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 40}}'
    async with server_harness(tmp_path) as harness:
        for options in ("type=list", f"schema={bounded}, max_tokens=140"):
            program = await harness.submit_source(f"yield gen('Ideas: ', {options})")
            (value,) = await values_of(program)
            assert isinstance(value, list)


async def test_a_program_can_handle_a_cut_list(tmp_path: Path) -> None:
    source = """try:
    ideas = gen('Ideas: ', type=list, max_tokens=4)
except ConstraintIncomplete:
    ideas = ['none']
yield ideas"""
    async with server_harness(tmp_path) as harness:
        assert await values_of(await harness.submit_source(source)) == [["none"]]


async def test_a_cut_choice_fails_because_it_is_not_a_choice(tmp_path: Path) -> None:
    async with server_harness(tmp_path) as harness:
        source = "kind = gen('Kind: ', choices=['billing', 'failure'], max_tokens=4)\nyield kind"
        program = await harness.submit_source(source)
        status = await program.end()
        assert status.status == "failed"
        error = status.variables["kind"].error
        assert error is not UNSET
        assert "was cut off by max_tokens=4 before one of its choices was complete" in error.message
        enough = await harness.submit_source(source.replace("=4", "=7"))
        assert await values_of(enough) in (["billing"], ["failure"])
