"""Weave, a scheduler of our own. As a library: `from systems.weave.module import Axis, Weave`."""
