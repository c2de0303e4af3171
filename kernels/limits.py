"""Limits that the kernels, the services and the wire share. Imports nothing."""

# Most draft tokens of one sequence in one step.
MAX_DRAFT_TOKENS = 32
# q is sent in units of 1 / WEIGHT_TOTAL.
WEIGHT_TOTAL = 1 << 16
# Candidates of a draft token unless told otherwise: with half as many, rejections cost more than is saved; what twice
# as many gain, drafting and checking them costs (docs/performance.md).
NUM_CANDIDATES = 128
# Most tokens that a drafter names for one place, the draft token among them.
MAX_OUTCOMES = 8
