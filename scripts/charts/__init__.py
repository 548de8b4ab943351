"""The charts that plot, report and reproduce share: each file draws one kind from records, and runs no model."""
