"""LLM calls: the executor of generate nodes.

program_calls     the calls of one program; call_priorities ranks them by its priority_table
llm_call          one call, slot by slot; outputs has its sampling parameters and values
kv_context        the call's context on an engine
aborted_outputs   the tokens that engines had decoded of aborted outputs
prefix_registry   shared prefixes, retained until their last reader
prompt_encoder    encodes prompts without blocking the event loop
"""
