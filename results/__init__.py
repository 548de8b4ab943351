"""What was measured: records, where they are kept, and what may be compared."""
