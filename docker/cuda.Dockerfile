# fp4deploy for a machine with an NVIDIA GPU: its kernels are compiled in the container, at their first use.
#
#     docker build -f docker/cuda.Dockerfile -t fp4deploy:cuda .
#     docker run --rm --gpus all --user "$(id -u):$(id -g)" -v "$PWD:/work" fp4deploy:cuda selftest
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
COPY . /fp4deploy
RUN python3 -m venv /opt/venv && pip install --no-cache-dir --constraint /fp4deploy/constraints.txt \
    '/fp4deploy[rtx,cuda,triton,video]' && rm -r /fp4deploy
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["fp4deploy"]
