"""LangChain and Conure: a chat model, and chains that become programs.

`ChatConure` is a chat model like any other, for a chain that runs as LangChain runs it.
`to_program` reads a chain's structure and gives back a program that the server runs
whole; what it cannot read it refuses by name, so a compiled chain is never another chain.

    from conure.adapters.langchain import ChatConure, to_program

    chain = prompt | ChatConure(temperature=0) | StrOutputParser()
    answer = to_program(chain).run(client, {"topic": "tea"})
"""

from .chat import ChatConure
from .compiled import Compiled, Outcome
from .walk import to_program

__all__ = ["ChatConure", "Compiled", "Outcome", "to_program"]
