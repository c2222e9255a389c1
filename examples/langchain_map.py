"""A LangChain map-reduce whose width the model decides: an outline, its parts, the whole.

The outline is held to a JSON schema of two to four headings. When it is there, `.map()` makes
as many calls as it has headings, all of them at once, and a last one joins what they wrote.

Start a server first: `conure serve`. Needs `pip install conure[langchain]`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import BaseModel, Field

from conure.adapters.langchain import ChatConure, accelerate
from conure.server.program.errors import ConureError

TOPIC = "how to keep bees on a balcony"


class Outline(BaseModel):
    """Headings of a short guide."""

    headings: list[str] = Field(min_length=2, max_length=4)


def build_chain(llm: ChatConure, max_tokens: int) -> Runnable[Any, str]:
    """The chain: a topic in, the guide out."""
    plan = ChatPromptTemplate.from_template(
        "Give two to four headings, each of a few words, for a short guide on {topic}."
    )
    write = ChatPromptTemplate.from_template(
        "Write two sentences for a guide on {topic}, under the heading: {heading}"
    )
    join = ChatPromptTemplate.from_template("Make one short guide of these parts:\n\n{parts}")
    # Room for the quotes and brackets of four headings; a cut outline is no outline.
    outline: Runnable[Any, Any] = plan | llm.bind(
        max_tokens=20 * max_tokens
    ).with_structured_output(Outline)
    part = write | llm.bind(max_tokens=max_tokens) | StrOutputParser()
    return (
        outline
        | RunnableLambda(_tasks)
        | part.map()
        | RunnableLambda(_joined)
        | join
        | llm.bind(max_tokens=max_tokens)
        | StrOutputParser()
    )


def _tasks(outline: Outline) -> list[dict[str, str]]:
    print(f"headings  {len(outline.headings)}")
    return [{"topic": TOPIC, "heading": heading[:80]} for heading in outline.headings]


def _joined(parts: list[str]) -> dict[str, str]:
    return {"parts": "\n\n".join(parts)}


def run(url: str | None, max_tokens: int) -> None:
    """Writes the guide and prints it."""
    llm = ChatConure(base_url=url, temperature=0)
    chain = accelerate(build_chain(llm, max_tokens), model=llm)
    print(f"topic     {TOPIC}")
    print(f"guide     {' '.join(chain.invoke({'topic': TOPIC}).split())}\n")
    print(chain.explain())


def main() -> int:
    """Reads the arguments and runs the example."""
    parser = argparse.ArgumentParser(description="LangChain map-reduce of a width that is decided")
    parser.add_argument("--url", help="of the server (CONURE_URL, else http://127.0.0.1:8400)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each part")
    arguments = parser.parse_args()
    try:
        run(arguments.url, arguments.max_tokens)
    except ConureError as problem:
        print(f"langchain_map: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
