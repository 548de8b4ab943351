"""Attention of all rows of a batch over their stored keys and values: one call a row, or one launch for all."""
