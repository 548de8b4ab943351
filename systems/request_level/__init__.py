"""Static batches, on the same engine."""
