"""Triton kernels, each beside its plain-torch reference.

The name is shared with a package on PyPI that transformers imports when it finds one and asks for its version; this
package is not that one, and says so with a version that no feature check of transformers accepts.
"""

__version__ = "0.0.0"
