"""The LlamaIndex LLM.

`llm` is `Conure`; `messages` converts messages and responses; `model_request` is one call as a
`generate` node; `call_backend` sends calls alone, or into an accelerated run.
"""
