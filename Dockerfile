# The gateway in a container: docs/deploy.md describes how to run it. It needs no privileges and no writable root file system.

# Python 3.11 is the version that the tests run on. The digest is that of 3.11.15 for all platforms.
FROM python:3.11-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3 AS build
WORKDIR /build
COPY requirements/build.txt requirements/kube.txt requirements/
RUN python -m venv tools \
 && tools/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt
RUN python -m venv --without-pip /opt/kvroute \
 && tools/bin/pip --python /opt/kvroute/bin/python install \
      --no-cache-dir --only-binary :all: --require-hashes -r requirements/kube.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY engine engine
RUN tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist ./engine . \
 && tools/bin/pip --python /opt/kvroute/bin/python install --no-cache-dir --no-deps --no-index dist/*.whl

FROM python:3.11-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3
LABEL org.opencontainers.image.title="kvroute" \
      org.opencontainers.image.description="Network-aware gateway for disaggregated LLM inference" \
      org.opencontainers.image.source="https://github.com/kvroute/kvroute" \
      org.opencontainers.image.licenses="Apache-2.0"
# The installer of the base image is not needed. The volume keeps compiled kernels; without it every start compiles them.
RUN python -m pip uninstall --yes --quiet --root-user-action=ignore setuptools wheel pip \
 && install --directory --owner=65532 --group=65532 /var/cache/kvroute
COPY --from=build /opt/kvroute /opt/kvroute
ENV PATH=/opt/kvroute/bin:$PATH \
    NUMBA_CACHE_DIR=/var/cache/kvroute \
    PYTHONDONTWRITEBYTECODE=1
VOLUME /var/cache/kvroute
USER 65532:65532
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8080, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["kvroute"]
CMD ["serve", "/etc/kvroute/cluster.yaml", "--host", "0.0.0.0"]
