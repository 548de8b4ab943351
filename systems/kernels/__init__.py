"""GPU kernels of our own, in Triton. Nothing here knows programs or schedules."""
