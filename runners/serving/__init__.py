"""Load for a system that serves: traces of requests, the process that sends them, and what the client saw."""
