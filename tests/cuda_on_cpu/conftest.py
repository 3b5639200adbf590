"""What the shim's own tests compile, they keep."""

from tests.cuda_on_cpu.fixtures import cuda_libraries

__all__ = ["cuda_libraries"]
