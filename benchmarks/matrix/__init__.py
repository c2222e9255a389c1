"""The six workloads, sent in several ways: by round trips, programs at once and KV memory.

`run` measures, `systems` has the ways of sending, `chains` builds LangChain chains, `vllm_server`
starts the other server, `ablated_server` switches parts of the policy off, `page` writes tables
from records.
"""
