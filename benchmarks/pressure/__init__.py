"""The six workloads where KV memory is short, sent in several ways.

`run` measures, `chains` builds LangChain chains, `ablated_server` switches parts of the policy off,
`page` writes tables from records.
"""
