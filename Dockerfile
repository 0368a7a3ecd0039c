# The page and the HTTP API of `cspd serve`, with the bundled models:
#   docker build --tag cspd . && docker run --publish 127.0.0.1:8000:8000 cspd
#   docker build --build-arg DEVICE=cuda --tag cspd:cuda . && docker run --gpus all --publish 127.0.0.1:8000:8000 cspd:cuda
# TORCH_INDEX, a package index, may name one with PyTorch's builds for CPUs, which are several GB smaller: see pytorch.org.
ARG DEVICE=cpu

FROM python:3.12-slim AS cpu
ARG TORCH_INDEX=
WORKDIR /app
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY cspd cspd
COPY mar mar
COPY checkpoints checkpoints
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --constraint constraints.txt '.[serve,text]' ./checkpoints

# Triton compiles the launchers of its kernels with a C compiler. The other libraries of CUDA come with PyTorch.
FROM cpu AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM ${DEVICE}
# calibrations, timings and files of the Hugging Face Hub: keep them in a volume
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN useradd --create-home --uid 1000 cspd && install --directory --owner cspd /cache
USER 1000
WORKDIR /home/cspd
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=8)"]
ENTRYPOINT ["cspd"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
