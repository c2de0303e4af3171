"""The drafter: rides ahead of the target and streams proposals."""
