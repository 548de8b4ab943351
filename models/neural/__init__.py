"""Modules that a translated pipeline consists of: WindTunnel's forms of classical machine-learning operators."""
