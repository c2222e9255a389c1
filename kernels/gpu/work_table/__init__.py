"""The work of a step as one int32 array, which the attention kernel reads on the GPU.

table      the layout of the array, and its extension while all rows decode
partition  cuts KV ranges and queries into items of equal cost
builder    builds the table of a plan, or extends the previous one
"""
