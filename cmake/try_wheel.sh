#!/usr/bin/env bash
# Installs a wheel beside one release of torch after another, each in a virtual environment of its own, and uses it as its
# user would: imports, trains the small job on two ranks, compares it with `sequential`, prints the doctor's report.
# Usage: try_wheel.sh WHEEL PYTHON TORCH...        TORCH: a release, as in 2.13.0
set -euo pipefail
[ $# -ge 3 ] && [ -f "$1" ] || { echo "usage: try_wheel.sh WHEEL PYTHON TORCH...; make wheels builds wheels, got: $*"; exit 2; }
wheel=$(readlink -f "$1")
python=$2
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for torch in "$@"; do
  echo "== torch $torch"
  "$python" -m venv "$folder/venv"
  "$folder/venv/bin/python" -m pip install -qq "torch==$torch" "numpy>=1.26"
  "$folder/venv/bin/python" -m pip install -qq "$wheel"
  (
    cd "$folder"
    venv/bin/nestpipe doctor
    venv/bin/nestpipe train --nproc 2 --compare > train.log || { cat train.log; exit 1; }
    grep identical train.log
  )
  rm -rf "$folder/venv"
done
