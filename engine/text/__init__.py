"""Token ids and text.

- `detokenizer`: turns ids into text incrementally, and finds stop strings.
- `byte_tokenizer`: tokenizer and chat template of the models that lack their own.
"""
