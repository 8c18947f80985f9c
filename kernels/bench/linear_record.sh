#!/usr/bin/env bash
# Checks the kernels that multiply, then measures them, for a record: a short table here, all rows in OUT.
#   linear_record.sh BENCH KERNELS OUT [ROUNDS]
# BENCH is linear_bench, KERNELS the folder with linear.ptx and linear.sm_90a.cubin, which is what is
# measured, OUT a folder. About three minutes with 11 rounds. Each program has a time limit: a kernel that hangs holds the GPU.
set -uo pipefail
bench=$1 kernels=$2 out=$3 rounds=${4:-11}
failed=0
run() { # run SECONDS NAME COMMAND...: its output goes to OUT/NAME.txt.
  local seconds=$1 name=$2
  shift 2
  timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
  local code=$?
  echo "$name: exit code $code"
  if ((code != 0)); then
    failed=1
    tail -3 "$out/$name.txt"
  fi
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader
for form in "check" "stored check"; do
  # shellcheck disable=SC2086  # two words
  run 60 "${form// /-}" "$bench" $form
  # shellcheck disable=SC2086
  run 60 "${form// /-}-cubin" "$bench" --kernels "$kernels/linear.sm_90a.cubin" $form
  # shellcheck disable=SC2086
  run 60 "${form// /-}-ptx" "$bench" --kernels "$kernels/linear.ptx" $form
done
shipped=("$bench" --kernels "$kernels/linear.sm_90a.cubin")
run 90 bench "${shipped[@]}" bench "$rounds"
run 60 bands "${shipped[@]}" bands "$rounds"
run 60 stored-bench "${shipped[@]}" stored bench "$rounds"
run 60 crossover "${shipped[@]}" crossover "$rounds"
grep -h "sums of four" -A 24 "$out"/{bench,bands,stored-bench}.txt | grep "^x"
cat "$out/crossover.txt"
for form in "hostile" "stored hostile"; do
  for tool in memcheck racecheck; do
    # Racecheck slows the kernels for 17 to 128 rows a hundred times.
    streams=$([[ $tool == memcheck ]] && echo 20 || echo 3)
    # shellcheck disable=SC2086
    run 60 "${form// /-}-$tool" compute-sanitizer --tool "$tool" "$bench" $form "$streams" 1
  done
done
nvidia-smi --query-gpu=clocks.sm,clocks.mem --format=csv,noheader
exit $failed
