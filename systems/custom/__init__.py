"""A scheduler of the user's own."""
