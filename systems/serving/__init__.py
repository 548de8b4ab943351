"""Serving: requests of a generative model, scheduled by iteration or by request, on one engine."""
