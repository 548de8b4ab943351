#!/bin/bash
# Builds an image of docker/Dockerfile without a Docker engine, and runs it: docker/rehearse.sh [TARGET]   (cpu if left out)
#
# buildah carries out every instruction in order, in a chroot. Its base comes from debootstrap and Debian's packages in place of
# Docker Hub's debian image. Then the image must hold no build tools, run as a user other than root, measure a model and leave
# the record on the host. It needs root, debootstrap, buildah, 25 GB of disk, and the network for Debian and PyPI:
# apt-get install debootstrap buildah. SCRATCH names the folder for all files; a folder that this script made is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-cpu}
if [ "$(id -u)" -ne 0 ]; then echo "docker/rehearse.sh must be run by root: debootstrap and chroot need it" >&2; exit 2; fi
for program in debootstrap buildah; do
    if ! command -v "$program" > /dev/null; then echo "docker/rehearse.sh needs $program: apt-get install $program" >&2; exit 2; fi
done
# buildah mounts the store on itself, and a folder with a mount cannot be removed.
clean() {
    buildah "${store[@]}" rm --all > /dev/null || true
    if mountpoint --quiet "$scratch/store/overlay"; then umount --recursive "$scratch/store/overlay"; fi
    rm -rf "$scratch"
}
scratch=${SCRATCH:-$(mktemp -d)}
store=(--root "$scratch/store" --runroot "$scratch/run" --storage-driver "${DRIVER:-overlay}")
if [ -z "${SCRATCH:-}" ] || [ ! -d "$SCRATCH" ]; then
    mkdir -p "$scratch"
    trap clean EXIT
    trap 'exit 130' INT TERM # which runs the trap of EXIT too
    export TMPDIR=$scratch # buildah writes layers there before it commits them
fi
free=$(df --output=avail --block-size=1G "$scratch" | tail -n 1)
if [ "$free" -lt 25 ] && [ ! -d "$scratch/store" ]; then echo "docker/rehearse.sh needs 25 GB of disk, not ${free// /}" >&2; exit 2; fi
base=localhost/debian:bookworm

if ! buildah "${store[@]}" inspect --type image "$base" > /dev/null 2>&1; then
    debootstrap --variant=minbase bookworm "$scratch/root" "${MIRROR:-http://deb.debian.org/debian}"
    rm -rf "$scratch"/root/var/lib/apt/lists/* "$scratch"/root/var/cache/apt/archives/*.deb
    container=$(buildah "${store[@]}" from scratch)
    buildah "${store[@]}" add "$container" "$scratch/root" / > /dev/null
    buildah "${store[@]}" config --cmd bash "$container"
    buildah "${store[@]}" commit --rm "$container" "$base"
    rm -rf "$scratch/root"
fi

# In the build pip trusts the certificates of this machine, which may include a proxy's.
mounts=()
if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
    printf '[global]\ncert = /run/certificates.crt\n' > "$scratch/pip.conf"
    mounts=(--volume "$scratch/pip.conf:/etc/pip.conf:ro" --volume /etc/ssl/certs/ca-certificates.crt:/run/certificates.crt:ro)
fi
buildah "${store[@]}" bud --isolation chroot --network host --pull-never "${mounts[@]}" \
    --build-arg "DEBIAN=$base" --build-arg "EXTRAS=${EXTRAS:-}" --build-arg "TORCH_INDEX=${TORCH_INDEX:-}" \
    --target "$target" --tag "opweave:$target" --file docker/Dockerfile .

container=$(buildah "${store[@]}" from --pull-never "localhost/opweave:$target")
root=$(buildah "${store[@]}" mount "$container")
echo "size: $(du -sh "$root" | cut -f 1)"
systems=eager,nimble
tools=(gcc g++ cc make git pip ld)
case $target in *-compiler) systems+=,torch_compile tools=(pip) ;; esac
for tool in "${tools[@]}"; do
    for folder in usr/bin usr/local/bin opt/venv/bin; do
        if [ -e "$root/$folder/$tool" ]; then echo "$target: left in the image: /$folder/$tool" >&2; exit 1; fi
    done
done
config=$(buildah "${store[@]}" inspect --format '{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}}' "$container")
if [ "$config" != "1000 [/opweave/docker/entrypoint.sh]" ]; then echo "$target: user and entrypoint are: $config" >&2; exit 1; fi

# As `docker compose run bench` would: the user of the image, the host's results mounted.
results=$scratch/results
rm -rf "$results"
mkdir "$results"
chown 1000:1000 "$results"
inside() { buildah "${store[@]}" run --isolation chroot --network host --volume "$results:/results" "$container" -- "$@"; }
test "$(inside id -u)" = 1000
inside /opweave/docker/entrypoint.sh -m model=squeezenet "system=$systems" runner=latency runner.samples=20 device=cpu
records=("$results"/runs/squeezenet-*.json)
commas=${systems//[^,]/}
test ${#records[@]} -eq $((${#commas} + 1))
test "$(grep --files-with-matches '"status": "ok"' "${records[@]}" | wc --lines)" -eq ${#records[@]}
test "$(stat --format %u "${records[0]}")" = 1000
echo "$target: built, and its records are on the host: ${records[*]##*/}"
