"""The gateway: one Generate call for clients, sequences, routing, fallback, text."""

from outrider.service import grpc_log as _grpc_log  # noqa: F401  # before gRPC is imported
