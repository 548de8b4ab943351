"""What the papers report, and what one released: one CSV file a paper, read and selected by `values`."""
