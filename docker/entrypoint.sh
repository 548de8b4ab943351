#!/bin/sh
# /results is where the host's folder is mounted. The locks by which sweeps take turns on a device go there too, so that those of
# several containers see each other, and what is kept from run to run, which a container would take with it.
set -e
mkdir -p /results/cache
export TMPDIR=/results/cache OPWEAVE_CACHE="${OPWEAVE_CACHE:-/results/cache/kept}"
exec python run.py results=/results/runs "$@"
