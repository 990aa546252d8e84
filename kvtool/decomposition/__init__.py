"""Decomposition: why a policy's kept set is right or wrong, event by event."""
