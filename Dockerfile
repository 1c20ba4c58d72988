# The demo in a container: train an encoder for eight languages on the CPU, and write the report to runs/demo.
#   docker build --tag metaphrase . && docker run --rm --volume "$PWD/runs:/metaphrase/runs" metaphrase
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
# The CPU build of torch, which is much smaller.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /metaphrase
COPY . .
RUN make install
CMD ["make", "demo"]
