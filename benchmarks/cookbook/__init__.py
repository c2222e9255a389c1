"""Thirty LangChain apps in the patterns of public cookbooks.

`chains` has the apps, `measure` the gain of `accelerate`.
"""
