"""LangChain and Conure: a chat model, and chains that become programs.

`ChatConure` is a chat model like any other, for a chain that runs as LangChain runs it.
`accelerate` lets a chain run as it does, with its calls running ahead of it on the server.
`to_program` reads a chain's structure and gives back a program that the server runs
whole; what it cannot read it refuses by name, so a compiled chain is never another chain.

    from conure.adapters.langchain import ChatConure, accelerate, to_program

    chain = prompt | ChatConure(temperature=0) | StrOutputParser()
    answer = accelerate(chain).invoke({"topic": "tea"})
    answer = to_program(chain).run(client, {"topic": "tea"})
"""

from .accelerate import Accelerated, Explanation, accelerate
from .chat import ChatConure
from .compiled import Compiled, Outcome
from .walk import to_program

__all__ = [
    "Accelerated",
    "ChatConure",
    "Compiled",
    "Explanation",
    "Outcome",
    "accelerate",
    "to_program",
]
