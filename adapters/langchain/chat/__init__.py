"""The LangChain chat model.

`model` is `ChatConure` and `settings` its arguments; `model_info` reports what a model can do;
`model_call` makes the program of one call; `call_options` converts LangChain's call arguments to
node fields; `messages` converts messages and `json_values` other values to JSON and back;
`answer_chunks` converts answers to chunks and results; `call_errors` converts errors; `sessions`
infers sessions from message histories; `structured_output` implements `with_structured_output`.
"""
