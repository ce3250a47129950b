#!/usr/bin/env bash
# What a machine with a GPU is asked, in under 6 minutes: doctor, tests, compute-sanitizer on the native kernels, benchmarks
# beside their peers. All results go to OUT; nothing is fetched, so a CUDA wheel for this Python is carried in dist/
# (make wheels), or the package is installed already. Run it from the root of the source tree. Exit code 1: something failed.
#
#   OUT=out/gpu bash bench/gpu/run.sh
#
# PYTHON: the interpreter, with torch. WHEELS: the folder of wheels. DEVICE, SCALE (part of the benchmarks' sizes), REPEAT:
# as `nestpipe bench` takes them. LIMIT: seconds of the longer parts. The full size needs about 60 GB of the device's memory.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-out/gpu}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
SCALE=${SCALE:-1.0}
REPEAT=${REPEAT:-5}
WHEELS=${WHEELS:-dist}
LIMIT=${LIMIT:-50}
TESTS=${TESTS:-tests/pipeline/test_cuda_pipeline.py tests/device/test_cuda_device.py tests/cuda/test_cuda_*.py}
mkdir -p "$OUT" || exit 2
failed=()

# NAME SECONDS COMMAND...: its output goes to OUT/NAME.txt, the end of it to the screen.
part() {
  local name=$1 limit=$2 started=$SECONDS code=0
  shift 2
  printf '== %s\n' "$name"
  timeout -k 10 "$limit" "$@" > "$OUT/$name.txt" 2>&1 || code=$?
  tail -n 12 "$OUT/$name.txt"
  printf '== %s: exit code %d, %d s\n' "$name" "$code" "$((SECONDS - started))"
  [ "$code" = 0 ] || failed+=("$name")
}

machine() {
  uname -srm
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit --format=csv || true
  nvcc --version | tail -n 2 || true
  $PYTHON -m nestpipe_kernels doctor
}

tag=$($PYTHON -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheel=$(ls "$WHEELS"/nestpipe_kernels-*cuda-"$tag"-*.whl 2> /dev/null | tail -n 1)
if [ -n "$wheel" ]; then
  $PYTHON -m pip install -qq --no-deps --no-index --force-reinstall --target build/gpu-site "$wheel"
  export PYTHONPATH=$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH}
fi

export -f machine
export PYTHON
part machine 30 bash -c machine
part device 30 $PYTHON -m nestpipe_kernels bench --device "$DEVICE" --only copy --scale 1e-4 --repeat 1
if [ "${#failed[@]}" -gt 0 ]; then
  echo "failed: ${failed[*]}: there is nothing to measure on"
  exit 1
fi
part tests "$LIMIT" $PYTHON -m pytest -q -p no:cacheprovider -m 'not soak' -k cuda $TESTS
if command -v compute-sanitizer > /dev/null; then
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in memcheck racecheck; do
    part "$tool" "$LIMIT" compute-sanitizer --tool "$tool" --error-exitcode 3 \
      $PYTHON -m nestpipe_kernels.bench.on_device.small_calls --device "$DEVICE" --sizes 1 63 700
  done
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
else
  echo "no compute-sanitizer on PATH: left out"
fi
part benches 150 $PYTHON -m nestpipe_kernels bench --device "$DEVICE" --peers --scale "$SCALE" \
  --repeat "$REPEAT" --json "$OUT/benches.jsonl"

if [ "${#failed[@]}" -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all parts passed; results in $OUT"
