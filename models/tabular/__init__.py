"""Tabular data sets and pipelines over them, in scikit-learn's terms. Needs the extra `windtunnel`."""
