#!/bin/sh
# The host's folder is mounted at /results. Two more things go there: the locks of sweeps, so that several containers take turns on
# a device, and the cache, which must outlive the container.
set -e
mkdir -p /results/cache
export TMPDIR=/results/cache OPWEAVE_CACHE="${OPWEAVE_CACHE:-/results/cache/kept}"
exec python run.py results=/results/runs "$@"
