#!/usr/bin/env bash
# Wheels for several Pythons: CPU alone, and with the CUDA kernels (build number 1cuda, which pip prefers) where there is a
# CUDA compiler. Sizes are told; one of more than 2.0 MB fails.
# Usage: make_wheels.sh FOLDER PYTHON...
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
mkdir -p "$folder"

variants=(cpu)
if command -v "${CUDACXX:-nvcc}" > /dev/null || ls /usr/local/cuda*/bin/nvcc > /dev/null 2>&1; then
  variants+=(cuda)
else
  echo "wheels: no CUDA compiler (nvcc on PATH, or CUDACXX), so CPU wheels only"
fi

build() {
  local python=$1 variant=$2 options=(--config-settings=cmake.define.NESTPIPE_CUDA=OFF)
  [ "$variant" = cuda ] && options=(--config-settings=cmake.define.NESTPIPE_CUDA=ON --config-settings=wheel.build-tag=1cuda)
  "$python" -m pip wheel -qq --no-deps "${options[@]}" --config-settings=build-dir="build/wheels/{wheel_tag}" -w "$folder" .
}

found=0
for python in "$@"; do
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
    echo "wheels: left out $python, which does not run here or is older than 3.10"
    continue
  fi
  found=$((found + 1))
  for variant in "${variants[@]}"; do
    build "$python" "$variant"
  done
done
[ "$found" -gt 0 ] || { echo "wheels: no Python to build for"; exit 1; }

for wheel in "$folder"/nestpipe_kernels-*.whl; do
  size=$(stat -c %s "$wheel")
  echo "$(basename "$wheel"): $((size / 1000)) kB"
  [ "$size" -le 2000000 ] || { echo "wheels: more than 2.0 MB"; exit 1; }
done
