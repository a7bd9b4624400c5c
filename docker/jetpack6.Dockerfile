# The runtime on a Jetson Orin with JetPack 6.1 or 6.2: Python 3.10, CUDA 12.6, cuDNN 9.3, TensorRT 10.3.
#
#   docker build -f docker/jetpack6.Dockerfile --build-arg BASE_IMAGE=.../l4t-jetpack:r36.4.0 \
#     --build-arg JETSON_AI_LAB=https://... -t specrt .
#   docker run --rm -it --runtime nvidia -v "$PWD/bundles:/bundles" specrt python3 scripts/doctor.py
#
# BASE_IMAGE is NVIDIA's image l4t-jetpack, from its own catalogue; JETSON_AI_LAB is the root of the Jetson AI Lab's package index.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ARG JETSON_AI_LAB
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip && rm -rf /var/lib/apt/lists/*
# PyPI's wheel for this processor has no kernels for an Orin (sm_87); 1.23 is the last ONNX Runtime for Python 3.10.
RUN pip3 install --no-cache-dir "onnxruntime-gpu==1.23.*" --index-url "${JETSON_AI_LAB}/jp6/cu126"
WORKDIR /specrt
COPY pyproject.toml README.md LICENSE ./
COPY runtime runtime
COPY engines engines
COPY export export
COPY scripts scripts
COPY examples examples
# The image's own TensorRT stays: it is the one that fits. cuda-bindings and tqdm are what engines need beside it.
RUN pip3 install --no-cache-dir . "cuda-bindings==12.6.*" tqdm
CMD ["python3", "scripts/doctor.py"]
