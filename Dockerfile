# syncbn-launch and train, with libtorch. For CPUs, and with the library for NVIDIA GPUs:
#
#   docker build --target cpu -t syncbn:cpu .
#   docker build --target cuda -t syncbn:cuda .
#   docker run --rm --shm-size=1g syncbn:cpu syncbn-launch --standalone --nproc_per_node=2 train --config configs/digits.yaml
#
# A run writes to /work/runs: mount a folder there (-v), or name another by run_dir.

# Versions of Debian's and Ubuntu's packages follow from the release.
# hadolint global ignore=DL3008

FROM debian:12-slim AS cpu-build
WORKDIR /source
COPY . .
# The installation has a copy of libtorch's headers and CPU libraries.
RUN scripts/setup \
  && scripts/build --configure \
  && scripts/build product \
  && cmake --install build --prefix /opt/syncbn

FROM debian:12-slim AS cpu
RUN apt-get update \
  && apt-get install -y --no-install-recommends libfmt9 libspdlog1.10 libyaml-cpp0.7 libdeflate0 libjpeg62-turbo libpng16-16 libssl3 zlib1g \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --create-home --home-dir /work syncbn \
  && ln -s /opt/syncbn/share/syncbn/configs /work/configs
COPY --from=cpu-build /opt/syncbn /opt/syncbn
ENV PATH=/opt/syncbn/bin:$PATH
USER 10001
WORKDIR /work
CMD ["train", "--help"]

FROM ubuntu:24.04 AS cuda-build
RUN apt-get update \
  && apt-get install -y --no-install-recommends python3-venv \
  && rm -rf /var/lib/apt/lists/* \
  && python3 -m venv /opt/torch \
  && /opt/torch/bin/pip install --no-cache-dir torch==2.11.0
ENV Torch_ROOT=/opt/torch/lib/python3.12/site-packages/torch
WORKDIR /source
COPY . .
RUN scripts/setup \
  && cmake --preset cuda -DSYNCBN_BUILD_TESTS=OFF \
  && cmake --build build-cuda --target syncbn_product \
  && cmake --install build-cuda --prefix /opt/syncbn

FROM ubuntu:24.04 AS cuda
RUN apt-get update \
  && apt-get install -y --no-install-recommends libfmt9 libspdlog1.12 libyaml-cpp0.8 libdeflate0 libjpeg-turbo8 libpng16-16t64 libssl3t64 zlib1g python3 \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --create-home --home-dir /work syncbn \
  && ln -s /opt/syncbn/share/syncbn/configs /work/configs
# All of torch: its wheels bring CUDA's libraries, cuDNN and NCCL.
COPY --from=cuda-build /opt/torch /opt/torch
COPY --from=cuda-build /opt/syncbn /opt/syncbn
ENV PATH=/opt/syncbn/bin:/opt/torch/bin:$PATH
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /work
CMD ["train", "--help"]
