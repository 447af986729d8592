#!/usr/bin/env bash
# Builds SGLang's own environment for a CPU, once for each set of pins, and prints its folder.
# Usage: build.sh FOLDER. The environment is FOLDER/sglang-<hash of the pins>; a finished one is used again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
torch=$(grep '^torch==' "$root/constraints.txt") # alone: SGLang pins other packages itself, numba among them
pins=$(echo "$torch" | cat - "$here/engine.txt" "$here/requirements.txt" | sha256sum | cut -c1-12)
mkdir -p "$1"
place=$(cd "$1" && pwd)/sglang-$pins
if [ ! -e "$place/.finished" ]; then
  rm -rf "$place"
  "${PYTHON:-python3.11}" -m venv "$place"
  install=("$place/bin/python" -m pip install -q)
  "${install[@]}" "$torch" >&2
  "${install[@]}" --no-deps -r "$here/engine.txt" >&2
  "${install[@]}" "$torch" -r "$here/requirements.txt" >&2
  touch "$place/.finished"
fi
echo "$place"
