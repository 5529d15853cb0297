# sdsage in an image: docker build -t sdsage .  (docs/install.md has the ways to build and run it)
FROM debian:bookworm-slim AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libgomp1 libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
# 1 for NVIDIA's GPUs, 0 for the CPU. No GPU is seen while an image is built: the architectures are named, or all.
ARG SDSAGE_CUDA=1
ARG SDSAGE_CUDA_ARCHS=all
ARG SDSAGE_GGML_CUDA_ARCHS=
ARG MAX_JOBS=
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-venv
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir "pip>=25.1" \
    && SDSAGE_NATIVE=OFF /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# the CUDA compiler was fetched for the build alone; the extra cuda brings the two libraries that are needed to run
RUN python3 -m venv /opt/sdsage \
    && if [ "$SDSAGE_CUDA" = 1 ]; then extras=video,hub,cuda; else extras=video,hub; fi \
    && /opt/sdsage/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[$extras]"

FROM base
COPY --from=build /opt/sdsage /opt/sdsage
RUN useradd --create-home --uid 1000 sdsage && install --directory --owner=1000 --group=1000 /work
USER 1000
WORKDIR /work
# what the NVIDIA Container Toolkit lends to the container: the GPUs, and the driver's libraries for CUDA and nvidia-smi
ENV PATH=/opt/sdsage/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["sdsage"]
CMD ["--help"]
