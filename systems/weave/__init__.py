"""Weave, a scheduler of our own: a search over rewriting decisions and stream plans, by the time of the whole graph."""
