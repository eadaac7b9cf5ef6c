#!/bin/sh
# The trial on a machine with a GPU, in at most nine minutes: python3 with torch for CUDA, and nothing of ours. Nothing is
# fetched. Wheels of what that Python lacks (transformers, if it is older than ours) are taken from the folder WHEELS.
#
#   sh research/gpu_trial.sh [--small] OUT.jsonl
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# as pip would install it: drafters, vision and app are packages of mmspec
cp -R "$root/mmspec" "$root/research" "$site"
cp -R "$root/drafters" "$root/vision" "$root/app" "$site/mmspec"
if [ -n "${WHEELS:-}" ]; then
    "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$WHEELS"/*.whl
fi
# not the packages of this folder, should that be the clone
PYTHONSAFEPATH=1 PYTHONPATH="$site" "${PYTHON:-python3}" -m research.gpu_trial "$@"
