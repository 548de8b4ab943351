"""Trees of other libraries in one normal form, a file a library."""
