"""Systems that learn from tables: pipelines, and what an engineer would use in their place."""
