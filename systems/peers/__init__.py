"""Other serving engines, on the same requests: what ours is measured beside."""
