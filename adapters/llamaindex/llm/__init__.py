"""The LlamaIndex LLM.

`llm` is `Conure`; `messages` and `answer_chunks` convert messages, responses and streams;
`request_options` reads the arguments of a call; `model_request` is one call as a `generate` node;
`call_backend` sends calls alone, or into an accelerated run; `answer_checks` refuses answers that
were cut; `server_tokenizer` counts as the server does.
"""
