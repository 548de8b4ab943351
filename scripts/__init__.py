"""What reads results: it draws, reports and compares, and runs no model."""
