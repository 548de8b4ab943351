"""The measurements, one a file, and the sweep that runs them cell by cell."""
