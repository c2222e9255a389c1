"""Prompts: from the text and messages of a call to token ids, and from output text to tool calls.

`prompt` renders a node's segments or messages, `chat`, `chat_template`, `chat_outline` and
`template_sandbox` apply a model's chat template, `tokenizer` and `token_bound` turn text into ids,
`tool_format` and `tool_calls` handle tool calls, and `served_model` bundles these for one model.
`constant_prefix` finds the constant beginning of a node's prompt, and `model_notices` lists
warnings about a model.
"""
