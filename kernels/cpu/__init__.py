"""The operations on a CPU: C++ kernels, compiled for the instruction set of the machine.

attention        attention and the KV store over torch tensors, by the library
elementwise      the operations between matrix products, by the library
linear           products with 16-bit weights
decoder          all layers of a decoder in one call
planner          the plan of each step
sampling         sampling of tokens
library          finds, compiles and loads the library of an instruction set
source/          C++, one file per operation; `simd.h` has the vectors of an instruction set,
                 `parallel.h` runs tasks on torch's threads
"""
