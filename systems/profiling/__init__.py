"""What each operator launches, takes and moves on its device, and what that costs, measured once and kept on disk."""
