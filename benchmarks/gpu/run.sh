#!/usr/bin/env bash
# bash run.sh 1|2|3      one call of at most ten minutes; README.md beside this file says what each one asks
#
# PYTHON   a Python that has torch with CUDA and transformers (default: python3)
# OUT      the folder that results go to (default: results/ beside this file)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/source/benchmarks/gpu/calls.py" --kit "$here" "$@"
