"""What the shim's own tests compile, they keep."""

from tests.cuda_on_cpu.fixtures import libraries

__all__ = ["libraries"]
