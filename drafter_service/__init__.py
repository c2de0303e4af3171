"""The drafter: rides ahead of the target and streams draft trees."""

from outrider.service import grpc_environment as _grpc_environment  # noqa: F401  # before gRPC is imported
from outrider.service import grpc_log as _grpc_log  # noqa: F401  # likewise
from outrider.service import openmp_environment as _openmp_environment  # noqa: F401  # before torch is imported
