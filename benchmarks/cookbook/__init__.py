"""Apps in the patterns of public cookbooks: thirty for LangChain, fifteen for LlamaIndex.

`langchain_apps` and `llamaindex_apps` have the apps, `cases` gives both one form, `measure` has the
gain of `accelerate`, `stream_soak` counts what thousands of streamed calls leave open.
"""
