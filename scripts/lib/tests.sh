# shellcheck shell=bash
# Sourced by scripts/test: runs groups of tests with pytest, and what failed once more.
#
#   run_pytest GROUP          tests/GROUP, all of it
#   run_again GROUP...        of each group what failed, alone and when all else is over
#   conclude GROUP...         what came of them, the counts in the last line; fails if a test did
#
# They need $root, $python and $reports (a folder of their own, outside of the tree).
#
# CACHEWARM_TEST_STRICT=1   nothing is run again

step() { # step NAME COMMAND...: runs it, and tells how that ended
  local name=$1 start=$SECONDS verdict=ok status=0
  shift
  printf '\n=== %s\n' "$name"
  "$@" || status=$?
  ((status == 0)) || verdict="FAILED (exit $status)"
  printf -- '--- %s: %s in %d s\n' "$name" "$verdict" $((SECONDS - start))
  return "$status"
}

_pytest() { # _pytest GROUP REPORT ARG...
  local group=$1 report=$2 status=0
  shift 2
  "$python" -m pytest -q "tests/$group" "$@" \
    -o cache_dir="$reports/cache/$group" --junitxml="$reports/$report.xml" || status=$?
  echo "$status" >"$reports/$report.status"
  return "$status"
}

run_pytest() {
  step "tests/$1" _pytest "$1" "$1" || true # `conclude` has the last word
}

run_again() {
  local group
  [[ ${CACHEWARM_TEST_STRICT:-} != 1 ]] || return 0
  for group in "$@"; do
    "$python" "$root/scripts/lib/reports.py" is-worth-another-run "$reports" "$group" || continue
    step "tests/$group again, what failed" \
      _pytest "$group" "$group.again" --tb=short --last-failed --last-failed-no-failures=none ||
      true
  done
}

conclude() {
  "$python" "$root/scripts/lib/reports.py" conclude "$reports" "$@"
}
