#!/usr/bin/env bash
# The measurements of the cases `pipeline` and `scheduler`, in order; about 30 minutes on two cores. Needs root, iproute2, TorchRec (make peers) and
# MovieLens-100K: measure_pipeline.sh PATH_OF_ml-100k.inter [NESTPIPE]
set -euo pipefail
movielens=$(realpath "$1") nestpipe=${2:-nestpipe}
results=$(cd "$(dirname "$0")" && pwd)

measure() {
  local name=$1
  shift
  rm -f "$results/pipeline_$name.jsonl"
  "$nestpipe" bench pipeline "$@" --json "$results/pipeline_$name.jsonl" > /dev/null
}

# 36 counted steps of each implementation: 4 rounds of 9.
measure paper_npu --net 500mbit --dense emulated --shape paper-npu --output out/pipeline_paper_npu
measure paper_npu_edges --net 500mbit --dense emulated --shape paper-npu --edge-share 0.5 --only fwp nested
measure paper_npu_4_ranks --net 250mbit --ranks 4 --dense emulated --shape paper-npu
measure ml100k --net 100mbit --dense emulated --shape ml100k --data "$movielens"
measure ml100k_cpu --net 100mbit --dense cpu --shape ml100k --data "$movielens"
measure criteo --net 250mbit --dense cpu --shape criteo --peers
measure dlrm --net 1gbit --dense cpu --shape dlrm --micro-batches 1 --peers --only nested nested+pooled
rm -f "$results/scheduler.jsonl"
"$nestpipe" bench scheduler --json "$results/scheduler.jsonl" > /dev/null
cp out/pipeline_paper_npu/side_by_side.png "$results/../../docs/side_by_side.png"
