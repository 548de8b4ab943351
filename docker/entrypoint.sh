#!/bin/sh
# /results is where the host's folder is mounted. The locks by which sweeps take turns on a device go there too, so that those of
# several containers see each other.
set -e
mkdir -p /results/cache
export TMPDIR=/results/cache
exec python run.py results=/results/runs "$@"
