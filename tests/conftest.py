"""What must stand before any test module is imported.

Triton decides when it is loaded whether kernels are compiled for a GPU or interpreted, and
transformers loads it. Without a GPU there is only the interpreter. `TRITON_INTERPRET=0` asks
for compiled kernels.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
