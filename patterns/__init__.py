"""What kernl knows about models: one file a computation, with the maths it recognises and the models it was seen in.

Importing this package registers all of them, through the same `kernl.register_pattern` that users call.
"""

import importlib.util

from kernl.patterns import dropout, linear, norm

if importlib.util.find_spec("kernl.patterns.attention"):
    from kernl.patterns import attention

__all__ = ["attention", "dropout", "linear", "norm"]
