#!/usr/bin/env bash
# Stage the peers of `megamoe bench` for a GPU machine without a network (x86-64, Python 3.12, torch 2.11, CUDA 13).
# usage: stage.sh DIR [PEER…]        then, on the GPU machine:   source DIR/install.sh
#   PEER: deep_gemm humming triton_kernels flashinfer; default: the first three, which run on Hopper (8 MB in all).
#         flashinfer runs on Blackwell alone and has 59 MiB: give it a folder of its own.
# Wheels only, each without what it requires: torch, triton, jinja2, cuda-bindings and the like must be there already.
set -euo pipefail
dir=${1:?usage: stage.sh DIR [PEER…]}
shift
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(deep_gemm humming triton_kernels)
mkdir -p "$dir"

get() {
	python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 --platform any -d "$dir" "$@"
}

for peer in "${peers[@]}"; do
	case $peer in
	# The newest release whose compiled module torch 2.11 can load; its Hopper kernels are 0.1.7's.
	deep_gemm) get sgl-deep-gemm==0.1.5.post1 apache-tvm-ffi==0.1.11 ;;
	humming) get humming-kernels==0.1.20 ;;
	triton_kernels) get tokenspeed-triton-kernels==1.0.0.post20260510 ;;
	flashinfer) get flashinfer-python==0.7.2.post1 ;;
	*)
		echo "stage.sh: unknown peer '$peer'; known: deep_gemm humming triton_kernels flashinfer" >&2
		exit 2
		;;
	esac
done

cat >"$dir/install.sh" <<'I'
# To be sourced: installs the wheels beside this file into a folder of their own and puts it on PYTHONPATH.
_peers=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
_site=${TMPDIR:-/tmp}/megamoe-peers
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$_site" "$_peers"/*.whl
export PYTHONPATH=$_site${PYTHONPATH:+:$PYTHONPATH}
I
du -sh "$dir"
