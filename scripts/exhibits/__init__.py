"""The papers' exhibits: what a preset asks for, what was measured of it, and how the paper's figures stand."""
