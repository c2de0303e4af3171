"""The gateway: one Generate call for clients, sequences, routing, fallback, text."""
