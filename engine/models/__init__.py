"""Models: which ones can run, and how they are loaded and computed.

registry                 finds and loads models by name
checkpoint               the contents of a model folder, without the weights
inspection               why a folder cannot be loaded
builtin                  the model that ships with Conure
llama, llama_config      Llama-like decoders, without transformers
weights, attention_hook  all other models, by transformers
attention_backend        the attention of a forward pass, which both kinds of models call
context_length           the longest context that a model computes correctly
probe                    tests that a model is correct with paged attention
batch_invariance         tests that its results do not depend on the batch
projection               products with the weights of linear modules
fused_decoder            a fused forward pass of Llama-like decoders
"""
