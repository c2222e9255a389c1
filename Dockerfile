# A server with an engine. For a CPU:
#
#     docker build -t conure .
#     docker run --network host -v conure:/data conure
#
# For an NVIDIA GPU, whose driver the host has:
#
#     docker build -t conure:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#     docker run --network host --gpus all -v conure:/data conure:cuda serve MODEL
#
# The server listens on the loopback interface only, so the container uses the host's network. The
# volume keeps the journal, downloaded models and compiled kernels.

FROM python:3.12-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/conure
WORKDIR /src
COPY constraints.txt ./
# torch first and by its exact version: another index has other builds of it.
RUN torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt) \
    && /opt/conure/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" \
        --extra-index-url https://pypi.org/simple -c constraints.txt "$torch"
COPY pyproject.toml README.md LICENSE ./
COPY adapters adapters
COPY conure conure
COPY engine engine
COPY kernels kernels
COPY server server
RUN /opt/conure/bin/pip install --no-cache-dir -c constraints.txt '.[all]'

FROM python:3.12-slim-bookworm
# The CPU kernels, and Triton's launchers on a GPU, are compiled at first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 conure \
    && install --directory --owner conure --group conure --mode 0700 /data
COPY --from=build /opt/conure /opt/conure
ENV PATH=/opt/conure/bin:$PATH XDG_CACHE_HOME=/data/cache XDG_STATE_HOME=/data/state
USER 10001
WORKDIR /home/conure
VOLUME /data
HEALTHCHECK --start-period=60s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8400/readyz', timeout=3)"]
ENTRYPOINT ["conure"]
CMD ["serve"]
