"""What a program will do, before it runs: graph, sharing, worst case and advice.

records    the explanation as data
explain    an explanation of a graph
prompts    prompts as pieces with token counts, and the prefixes that calls share
worst_case the largest number of calls and tokens
advice     dead nodes, and prompt orders that prevent sharing
rendering  an explanation as text and as a Mermaid diagram
"""
