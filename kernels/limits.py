"""Limits that the kernels, the services and the wire share. Imports nothing."""

# Most draft tokens of one sequence in one step.
MAX_DRAFT_TOKENS = 32
# q is sent in units of 1 / WEIGHT_TOTAL.
WEIGHT_TOTAL = 1 << 16
