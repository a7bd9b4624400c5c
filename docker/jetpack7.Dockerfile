# The runtime on a Jetson Orin or Thor with JetPack 7.2 or later: Python 3.12, CUDA 13.2, cuDNN 9.20, TensorRT 10.16.
#
#   docker build -f docker/jetpack7.Dockerfile -t specrt .        # hours on the device; --build-arg ARCHITECTURES=87 halves it
#   docker run --rm -it --gpus all -v "$PWD/bundles:/bundles" specrt python3 scripts/doctor.py
#
# No image named after JetPack exists for this generation: it is Ubuntu 24.04 with CUDA 13, and so is this. No ONNX Runtime wheel
# with kernels for these GPUs is published either, so one is built: sm_87 is Orin, sm_110 is Thor.
ARG CUDA=13.2.1

FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04 AS wheel
ARG ONNXRUNTIME=v1.31.1
ARG ARCHITECTURES="87-real;110-real"
# A compilation of attention kernels takes up to 6 GB; more jobs than memory holds are killed without a word.
ARG JOBS=2
RUN apt-get update && apt-get install -y --no-install-recommends \
    build-essential ca-certificates git python3-dev python3-pip python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir "cmake>=3.28" ninja numpy packaging setuptools wheel
RUN git clone --depth 1 --branch "${ONNXRUNTIME}" --recurse-submodules --shallow-submodules \
    https://github.com/microsoft/onnxruntime /onnxruntime
WORKDIR /onnxruntime
RUN PATH="/build/bin:${PATH}" ./build.sh --config Release --build_wheel --parallel "${JOBS}" --skip_tests --allow_running_as_root \
    --use_cuda --cuda_home /usr/local/cuda --cudnn_home /usr \
    --cmake_extra_defines CMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES}" onnxruntime_BUILD_UNIT_TESTS=OFF

FROM nvidia/cuda:${CUDA}-cudnn-runtime-ubuntu24.04
# Libraries for discrete GPUs' drivers; on a Jetson they would hide the driver that the container runtime brings in.
RUN rm -rf /usr/local/cuda/compat
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --system-site-packages /venv
ENV PATH="/venv/bin:${PATH}"
COPY --from=wheel /onnxruntime/build/Linux/Release/dist/*.whl /wheels/
RUN pip install --no-cache-dir /wheels/*.whl
WORKDIR /specrt
COPY pyproject.toml README.md LICENSE ./
COPY runtime runtime
COPY engines engines
COPY export export
COPY scripts scripts
COPY examples examples
RUN pip install --no-cache-dir . "cuda-bindings==13.2.*" tqdm
CMD ["python3", "scripts/doctor.py"]
