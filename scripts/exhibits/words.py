"""What tables and pictures call the metrics of published values."""

RATIO_WORDS = {
    "sm_efficiency_gain": ", SM efficiency",
    "sm_efficiency_min": ", SM efficiency",
    "sm_efficiency_max": ", SM efficiency",
    "active_warps": ", active warps",
    "slo_rate": ", largest rate at the SLO",
    "saturation": ", requests a second at saturation",
    "itl_p99": ", p99 between tokens",
    "batch_time": ", time of a batch",
    "increment_time": ", an increment iteration",
}
EXTREMES = {
    "speedup_min": "smallest",
    "speedup_max": "largest",
    "sm_efficiency_min": "smallest",
    "sm_efficiency_max": "largest",
}
WORDS = {
    "concurrency_trend": "the larger, the higher the degree of logical concurrency",
    "macs_trend": "the larger, the fewer MACs",
    "gpu_idle": "GPU idle",
    "macs": "MACs",
    "operations_per_convolution": "operations a convolution",
    "parallelism": "GPU active time over critical path",
    "sm_efficiency": "SM efficiency",
    "block_speedup": "its fastest block over sequential",
    "profiling_time": "profiling",
}
