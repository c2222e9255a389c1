#!/usr/bin/env bash
# Collect what a GPU machine without a network needs, in folders of at most 64 MiB each:
#
#   .gpu     wheels that the machine lacks, FlashInfer with compiled modules, compiled Triton kernels
#   .gpu_v   vLLM's Python, its dependencies, FlashAttention 3
#   .gpu_c   vLLM's core operators
#   .gpu_s   wheels that only the server needs
#
#     bash benchmarks/gpu/pack/pack.sh [wheels] [flashinfer] [triton] [vllm]      all four by default
#
# From the repository's root, on a machine with a network, Python 3.12 (PYTHON312) and, for
# FlashInfer, nvcc 13 (CUDA_HOME). No GPU is needed. WORK keeps what has been downloaded: 8 GB.
# FA3=1 also compiles FlashInfer's FA3, which takes ten minutes.
set -euo pipefail
WORK=${WORK:-/tmp/conure-pack}
PYTHON312=${PYTHON312:-python3.12}
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
PARTS=${*:-wheels flashinfer triton vllm}
LIMIT=$((64 * 1024 * 1024))
mkdir -p "$WORK" .gpu .gpu_v .gpu_c .gpu_s

# The libraries of the GPU machine, in an environment of their own.
STACK="$WORK/v/bin/python"
if [ ! -x "$STACK" ]; then
  "$PYTHON312" -m venv "$WORK/v"
  "$STACK" -m pip install -q --no-compile torch==2.11.0 triton==3.6.0 transformers==5.17.0 \
    numpy==2.5.2 pytest pytest-timeout hypothesis einops tabulate ninja click requests tqdm \
    packaging nvidia-ml-py httpx
fi

# Wheels for Python 3.12 on x86-64, without what they require.
download() {
  local platforms="" version
  for version in 17 24 27 28 31 34 35; do platforms+=" --platform manylinux_2_${version}_x86_64"; done
  # shellcheck disable=SC2086  # the platforms are several words
  "$STACK" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp $platforms --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 -d "$@"
}

wheels() {
  rm -f .gpu/*.whl .gpu_s/*.whl
  download .gpu msgspec==0.22.0 cachetools==8.0.1 pytest-asyncio==1.5.0 llguidance==1.9.1 \
    "apache-tvm-ffi<0.2" jsonschema==4.26.0 referencing rpds-py jsonschema-specifications
  download .gpu_s "litestar<3" litestar-htmx multipart polyfactory faker rich-click sniffio \
    uvicorn httptools google-re2 shtab
}

flashinfer() {
  local site="$WORK/flashinfer" wheel
  rm -rf "$site" && mkdir -p "$site" "$WORK/lib"
  download "$WORK" flashinfer-python==0.6.15
  for wheel in "$WORK"/flashinfer*.whl .gpu/apache_tvm*.whl; do
    "$STACK" -m zipfile -e "$wheel" "$site"
  done
  echo 'int unused;' | gcc -shared -fPIC -x c - -o "$WORK/lib/libcuda.so"  # linked, never loaded
  LIBRARY_PATH="$WORK/lib" FLASHINFER_WORKSPACE_BASE="$WORK" PATH="$WORK/v/bin:$CUDA_HOME/bin:$PATH" \
    CPATH="$(echo "$WORK"/v/lib/python3.12/site-packages/nvidia/cu13/include)" \
    PYTHONPATH="$PWD:$PWD/benchmarks:$site" "$STACK" benchmarks/gpu/pack/flashinfer_modules.py ${FA3:+--fa3} --jobs 1
  # The headers of CUTLASS and others are needed to compile, and are half of the size.
  tar cJf .gpu/site-flashinfer.tar.xz -C "$site" --exclude=__pycache__ \
    --exclude=flashinfer/data/cutlass --exclude=flashinfer/data/cccl \
    --exclude=flashinfer/data/spdlog flashinfer flashinfer_python-0.6.15.dist-info
}

triton() {
  # A rehearsal on a fake device compiles what the stages launch, by the machine's own Triton.
  local cache="$WORK/triton" here="$WORK/here"
  rm -rf "$cache" "$here" .gpu/triton.tar.xz  # the last one would be unpacked and used
  CONURE_GPU="$here" TRITON_CACHE_DIR="$cache" \
    "$STACK" benchmarks/first_gpu.py smoke micro decode grid ours sweep \
    --rehearse --compile --limit-s 1800 --rounds 1 --out "$WORK/rehearsal"
  tar cJf .gpu/triton.tar.xz -C "$cache" .
}

vllm() {
  local site="$WORK/vllm" deps="$WORK/vllm_deps"
  rm -rf "$site" "$deps"
  download "$WORK" vllm==0.26.0
  "$STACK" -m zipfile -e "$WORK"/vllm-0.26.0*.whl "$site"
  # Kernels of other models and formats.
  rm -rf "$site"/vllm/{vllm-rs,_qutlass*,_flashmla*,_moe_C_stable*} \
    "$site"/vllm/vllm_flash_attn/_vllm_fa2_C* \
    "$site"/vllm/third_party/{deep_gemm,fmha_sm100,flashmla}
  "$STACK" -m pip install -q --no-compile --no-deps --target "$deps" msgspec==0.22.0 \
    pydantic==2.14.3 pydantic_core==2.50.4 annotated-types typing-inspection cbor2 pyzmq pybase64 \
    blake3 "openai<3" openai-harmony jiter distro sniffio starlette "fastapi==0.136.0" \
    "llguidance==1.7.6" lark==1.2.2 outlines_core==0.2.14 xgrammar partial-json-parser cachetools \
    py-cpuinfo python-json-logger setproctitle depyf==0.20.0 astor compressed-tensors==0.17.0 \
    apache-tvm-ffi
  # Code of other architectures, and of data types that the benchmark does not use.
  CUOBJDUMP="$WORK"/v/lib/python3.12/site-packages/triton/backends/nvidia/bin/cuobjdump \
    "$STACK" benchmarks/gpu/pack/fatbin.py "$site"/vllm/vllm_flash_attn/_vllm_fa3_C*.so \
    --without half_t e4m3 --but Combine
  "$STACK" benchmarks/gpu/pack/fatbin.py "$site"/vllm/_C_stable_libtorch.abi3.so
  tar cJf .gpu_v/vllm_deps.tar.xz --exclude=__pycache__ -C "$deps" .
  tar cJf .gpu_c/vllm-core.tar.xz -C "$site" vllm/_C_stable_libtorch.abi3.so
  tar cJf .gpu_v/vllm-python.tar.xz --exclude=__pycache__ --exclude=_C_stable_libtorch.abi3.so \
    -C "$site" .
}

for part in $PARTS; do "$part"; done

status=0
for folder in .gpu .gpu_v .gpu_c .gpu_s; do
  bytes=$(du -sb "$folder" | cut -f1)
  printf '%-8s %6.1f MiB\n' "$folder" "$(echo "$bytes / 1048576" | bc -l)"
  if [ "$bytes" -gt "$LIMIT" ]; then echo "$folder exceeds 64 MiB: it cannot travel"; status=1; fi
done
tracked=$(git ls-files -z | xargs -0 du -cb | tail -1 | cut -f1)
printf '%-8s %6.1f MiB\n' tracked "$(echo "$tracked / 1048576" | bc -l)"
exit $status
