# fp4deploy for a machine without a GPU: training, export, engines for SM120, ONNX Runtime.
#
#     docker build -f docker/cpu.Dockerfile --build-arg TORCH_INDEX=URL -t fp4deploy:cpu .
#     docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" fp4deploy:cpu run --demo
#
# TORCH_INDEX: PyTorch's index of builds for the CPU. Without it pip's default torch brings gigabytes of CUDA libraries.
FROM python:3.13-slim
ARG TORCH_INDEX=
COPY . /fp4deploy
RUN PIP_EXTRA_INDEX_URL=$TORCH_INDEX pip install --no-cache-dir --constraint /fp4deploy/constraints.txt \
    '/fp4deploy[rtx,video]' && rm -r /fp4deploy
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["fp4deploy"]
