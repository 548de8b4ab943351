"""Iteration-level scheduling with selective batching."""
