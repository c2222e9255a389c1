"""The LangChain adapter: a chat model, and two ways to run chains on a Conure server.

`ChatConure` is a chat model for chains that LangChain runs. `accelerate` lets LangChain run a chain
while the server runs its calls ahead. `to_program` compiles a chain to a program that runs as a
whole on the server, and rejects, by name, what it cannot compile.

    from conure.adapters.langchain import ChatConure, accelerate, to_program

    chain = prompt | ChatConure(temperature=0) | StrOutputParser()
    answer = accelerate(chain).invoke({"topic": "tea"})
    answer = to_program(chain).run(client, {"topic": "tea"})
"""

try:
    from .acceleration.accelerate import Accelerated, Explanation, accelerate
    from .chat.model import ChatConure
    from .compilation.compiled_chain import ChainOutcome, CompiledChain
    from .compilation.compiler import to_program
    from .embeddings import ConureEmbeddings
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "langchain_core":
        raise
    raise ModuleNotFoundError(
        "conure.adapters.langchain needs langchain-core: pip install 'conure[langchain]'",
        name=error.name,
    ) from error

__all__ = [
    "Accelerated",
    "ChainOutcome",
    "ChatConure",
    "CompiledChain",
    "ConureEmbeddings",
    "Explanation",
    "accelerate",
    "to_program",
]
