# feddar for a coordinator (feddar server) and for a site (feddar client); docs/deploy.md says how it is used.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
# The address of torch's index of packages for processors only. Without it, pip's own has torch with CUDA, which is much larger.
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY requirements.lock .
RUN python -m venv /opt/feddar \
    && /opt/feddar/bin/pip install -c requirements.lock ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install -c requirements.lock hatchling
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-deps --no-build-isolation --wheel-dir wheels . \
    && /opt/feddar/bin/pip install -c requirements.lock "$(echo wheels/*.whl)[flower,compare]"

FROM python:${PYTHON}
RUN useradd --no-log-init --create-home --uid 10001 feddar && install -d -o feddar -g feddar /study
COPY --from=build /opt/feddar /opt/feddar
ENV PATH=/opt/feddar/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
# Studies, keys, tables and results are mounted here; nothing of them is in the image.
WORKDIR /study
EXPOSE 9092
ENTRYPOINT ["feddar"]
CMD ["--help"]
