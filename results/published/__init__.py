"""What the papers report: one CSV file a paper, read and selected by `values`."""
