#!/usr/bin/env bash
# The measurements of the case `tier`, in order; about ten minutes on two cores. Needs root (control groups) and 4 GB of a local
# disk: measure_tier.sh DIRECTORY_ON_THE_DISK [NESTPIPE]
set -euo pipefail
directory=$(realpath "$1") nestpipe=${2:-nestpipe}
results=$(cd "$(dirname "$0")" && pwd)

measure() {
  local name=$1
  shift
  rm -f "$results/tier_$name.jsonl"
  "$nestpipe" bench tier --directory "$directory" "$@" --json "$results/tier_$name.jsonl" > /dev/null
}

# 60 counted steps; the store holds 1 GiB of rows, 256 MiB of which stay in memory.
measure cpu --repeat 60
measure emulated --dense emulated --compute-ms 150 --repeat 60
# Nothing but lookups: what the disk itself allows.
measure disk_bound --bag 10 --hidden 16 --repeat 60
