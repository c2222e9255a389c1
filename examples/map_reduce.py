"""A LangChain map-reduce over a short story, run as one program.

The chain is ordinary LangChain: one small chain per section of the story, all of them in
parallel, and a last prompt that reads what they found. `to_program` turns it into one
program; the server sees all calls at once, computes the text that they start with once,
and starts the last call the moment the last section is read.

Start a server first: `conure serve`. Needs `pip install conure[langchain]`.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from operator import itemgetter
from pathlib import Path
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, to_program
from conure.server.program.errors import ConureError
from conure.server.program.status import Receipt

TEXT = Path(__file__).parent / "texts" / "tell_tale_heart.txt"
SECTION_CHARS = 1_250
"""Sections end between paragraphs or sentences, so most are a little longer or shorter."""

RULES = """You are a careful reader who takes notes for a study of narrators.
Work only from the section that you are given; never use what you know of the whole story.
Write down, in this order and in one short paragraph: what happens; what the narrator
claims about himself; and one detail of the text that speaks against that claim. Quote at
most six words in a row. If the section holds nothing of one of the three, say so plainly
instead of inventing it. Do not name the author, do not judge the style, do not address
the reader."""


def sections_of(text: str, size: int = SECTION_CHARS) -> list[str]:
    """Cuts a text between sentences into pieces of about `size` characters."""
    sentences = (
        text.replace("\n\n", "\n\n\0").replace(". ", ". \0").replace("! ", "! \0").split("\0")
    )
    sections = [""]
    for sentence in sentences:
        if len(sections[-1]) + len(sentence) / 2 > size:
            sections.append("")
        sections[-1] += sentence
    return [section.strip() for section in sections if section.strip()]


def build_chain(num_sections: int, llm: ChatConure) -> Runnable[Any, str]:
    """The chain: {"section_1": ..., ...} in, the reduced answer out."""
    read = ChatPromptTemplate.from_messages(
        [("system", RULES), ("human", "Take notes on this section.\n\n{section}")]
    )
    numbers = range(1, num_sections + 1)
    notes = RunnableParallel(
        {
            f"notes_{n}": {"section": itemgetter(f"section_{n}")} | read | llm | StrOutputParser()
            for n in numbers
        }
    )
    listed = "\n\n".join(f"Section {n}: {{notes_{n}}}" for n in numbers)
    question = "Using the notes alone, say in three sentences whether the narrator can be believed."
    conclude = ChatPromptTemplate.from_messages(
        [
            ("system", "You weigh evidence."),
            ("human", f"Notes on a story:\n\n{listed}\n\n{question}"),
        ]
    )
    return notes | conclude | llm | StrOutputParser()


def print_receipt(receipt: Receipt) -> None:
    """Prints what the program cost."""
    prompt, output = receipt.prompt_tokens, receipt.output_tokens
    shared = prompt.shared
    total = shared.static + shared.dynamic + shared.generated + shared.cache
    print("receipt")
    print(f"  calls            {receipt.calls}")
    print(
        f"  prompt tokens    {prompt.logical} logical = {prompt.computed} computed + {total} shared"
    )
    print(
        f"  shared           {shared.static} static, {shared.dynamic} dynamic, "
        f"{shared.generated} generated, {shared.cache} cache"
    )
    print(f"  output tokens    {output.decoded} decoded")
    print(
        f"  critical path    {' -> '.join(receipt.critical_path)} ({receipt.critical_path_s:.2f} s)"
    )
    print(f"  wall time        {receipt.wall_s:.2f} s")
    print(f"  blocks held      {receipt.blocks_held}")


def run(client: Client, max_tokens: int) -> None:
    """Submits the map-reduce and prints its answers and receipt."""
    for model in client.models()[:1]:
        print(f"model {model['id']}: {model.get('description') or 'no description'}")
    header, _, story = TEXT.read_text(encoding="utf-8").partition("\n\n")
    sections = sections_of(story)
    print(f"{header.splitlines()[0]}: {len(story)} characters in {len(sections)} sections\n")

    chain = build_chain(len(sections), ChatConure(temperature=0, max_tokens=max_tokens))
    compiled = to_program(chain, name="map-reduce")
    story_input = {f"section_{n}": section for n, section in enumerate(sections, 1)}

    program = client.submit(compiled.submission(story_input))
    print(f"program {program.id}: {len(compiled.program['nodes'])} calls submitted at once\n")
    for n in range(1, len(sections) + 1):
        print_answer(f"section {n}", program.get(f"notes_{n}"))
    print_answer("answer", compiled.output(story_input, program.result()))
    print_receipt(program.receipt())


def print_answer(title: str, answer: str) -> None:
    """Prints one answer, folded and indented."""
    print(title)
    print(textwrap.indent(textwrap.fill(answer, width=92), "  ") + "\n")


def main() -> int:
    """Reads the arguments and runs the example."""
    parser = argparse.ArgumentParser(description="LangChain map-reduce over a short story")
    parser.add_argument("--url", help="of the server (CONURE_URL, else http://127.0.0.1:8400)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    arguments = parser.parse_args()
    try:
        with Client(arguments.url) as client:
            run(client, arguments.max_tokens)
    except ConureError as problem:
        print(f"map_reduce: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
