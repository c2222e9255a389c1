"""Other people's programs become Conure programs: client, LangChain."""
