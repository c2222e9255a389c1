"""The language that both sides speak: programs as data, and what can be read off them.

Pure data and analysis; msgspec is the only dependency. Nothing here does I/O, knows a
tokenizer, or knows that engines exist.
"""
