"""The operations on a GPU, as Triton kernels. Importing a module of this folder imports triton.

launcher       the implementation: work tables on the device, launches, scratch memory
attention      the attention kernel
merge          the kernel that merges partials
kv_cache       the kernels that write KV caches and copy blocks
elementwise    the elementwise operations of a decoder layer
flashinfer_backend  FlashInfer's paged attention, where it is installed
sampling       the kernels that sample tokens
configuration  tile sizes, warps and pipeline depths by shape
work_table/    the work of a step as one array for the attention kernel
"""
