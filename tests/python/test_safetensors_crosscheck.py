# SPDX-License-Identifier: Apache-2.0
"""Compares our safetensors reader, seen through `espalier inspect`, with the package on PyPI."""

import json
import os
import pathlib
import struct
import subprocess

import numpy
import pytest
import safetensors
import safetensors.numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("ESPALIER_BINARY", str(ROOT / "build" / "espalier"))

EXIT_FORMAT = 4


def inspect(path):
    return subprocess.run(
        [BINARY, "inspect", str(path), "--tensors", "--json"], capture_output=True, text=True, timeout=60, check=False
    )


def described_tensors(path):
    done = inspect(path)
    assert done.returncode == 0, done.stderr
    return {tensor["name"]: tensor for tensor in json.loads(done.stdout)["tensors"]}


def check_same(path, arrays, dtypes):
    described = described_tensors(path)
    assert set(described) == set(arrays)
    raw = path.read_bytes()
    for name, array in arrays.items():
        tensor = described[name]
        assert tensor["dtype"] == dtypes[name]
        assert tensor["shape"] == list(array.shape)
        assert tensor["file"] == path.name
        assert tensor["size_bytes"] == array.nbytes
        begin = tensor["offset_bytes"]
        assert raw[begin : begin + array.nbytes] == array.tobytes()


NUMPY_DTYPES = {
    "BOOL": numpy.bool_,
    "U8": numpy.uint8,
    "I8": numpy.int8,
    "U16": numpy.uint16,
    "I16": numpy.int16,
    "F16": numpy.float16,
    "U32": numpy.uint32,
    "I32": numpy.int32,
    "F32": numpy.float32,
    "U64": numpy.uint64,
    "I64": numpy.int64,
    "F64": numpy.float64,
    "C64": numpy.complex64,
}


def test_every_dtype_and_shape(tmp_path):
    random = numpy.random.default_rng(1)
    arrays, dtypes = {}, {}
    for dtype, kind in NUMPY_DTYPES.items():
        for shape in [(), (1,), (7,), (3, 5), (2, 1, 4), (0,), (3, 0, 2)]:
            name = f"{dtype}.{'x'.join(map(str, shape))}"
            arrays[name] = random.integers(0, 2, size=shape).astype(kind)
            dtypes[name] = dtype
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt", "key": 'va"lue\n'})
    check_same(path, arrays, dtypes)


@pytest.mark.parametrize("name", ["a.b", 'quote"', "back\\slash", "line\nbreak", "größe", "\U0001f333", "a b", "x" * 5000])
def test_names(tmp_path, name):
    arrays = {name: numpy.arange(3, dtype=numpy.int32)}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path)
    check_same(path, arrays, {name: "I32"})


@pytest.mark.parametrize("seed", range(20))
def test_random_files(tmp_path, seed):
    random = numpy.random.default_rng(seed)
    arrays, dtypes = {}, {}
    for i in range(random.integers(0, 40)):
        dtype = str(random.choice(list(NUMPY_DTYPES)))
        shape = tuple(random.integers(0, 6, size=random.integers(0, 5)))
        arrays[f"t{i}"] = random.integers(0, 100, size=shape).astype(NUMPY_DTYPES[dtype])
        dtypes[f"t{i}"] = dtype
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path)
    check_same(path, arrays, dtypes)


def entry(dtype="U8", shape="[4]", offsets="[0,4]"):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def one(**fields):
    return '{"t":' + entry(**fields) + "}"


def two(first, second):
    return '{"a":' + entry(**first) + ',"b":' + entry(**second) + "}"


# name: (header, bytes of data, header length where it is not the true one)
BROKEN = {
    "no bytes of header": ("", 0, None),
    "length one": ("{}", 0, 1),
    "length beyond the file": ("{}", 0, 3),
    "length 100,000,001": ("{}", 0, 100_000_001),
    "length 2^63": ("{}", 0, 2**63),
    "length 2^64-1": ("{}", 0, 2**64 - 1),
    "an array": ("[]", 0, None),
    "byte order mark": ("\ufeff{}", 0, None),
    "cut": ('{"t":', 0, None),
    "text after it": ("{}x", 0, None),
    "two objects": ("{}{}", 0, None),
    "trailing comma": ('{"t":' + entry() + ",}", 4, None),
    "single quotes": ("{'t':" + entry() + "}", 4, None),
    "comment": ("{/* */}", 0, None),
    "not an entry": ('{"t":1}', 0, None),
    "entry is null": ('{"t":null}', 0, None),
    "entry is empty": ('{"t":{}}', 0, None),
    "no dtype": ('{"t":{"shape":[4],"data_offsets":[0,4]}}', 4, None),
    "no shape": ('{"t":{"dtype":"U8","data_offsets":[0,4]}}', 4, None),
    "no offsets": ('{"t":{"dtype":"U8","shape":[4]}}', 4, None),
    "field twice": ('{"t":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4, None),
    "unknown dtype": (one(dtype="F128"), 4, None),
    "dtype in lower case": (one(dtype="u8"), 4, None),
    "shape is a number": (one(shape="4"), 4, None),
    "shape is negative": (one(shape="[-4]"), 4, None),
    "shape is fractional": (one(shape="[4.0]"), 4, None),
    "shape is a string": (one(shape='["4"]'), 4, None),
    "shape overflows": (one(shape="[4294967296,4294967296]", offsets="[0,0]"), 0, None),
    "shape overflows before a zero": (one(shape="[4294967296,4294967296,0]", offsets="[0,0]"), 0, None),
    "shape beyond 64 bits": (one(shape="[18446744073709551616]"), 4, None),
    "offsets are negative": (one(offsets="[-4,0]"), 4, None),
    "offsets are fractional": (one(offsets="[0.0,4.0]"), 4, None),
    "one offset": (one(offsets="[4]"), 4, None),
    "three offsets": (one(offsets="[0,4,4]"), 4, None),
    "offsets backwards": (one(offsets="[4,0]"), 4, None),
    "offsets against shape": (one(offsets="[0,3]"), 3, None),
    "offsets past the end": (one(), 3, None),
    "offsets far past the end": (one(offsets="[18446744073709551611,18446744073709551615]"), 4, None),
    "trailing bytes": (one(), 5, None),
    "only trailing bytes": ("{}", 1, None),
    "first not at 0": (one(offsets="[1,5]"), 5, None),
    "hole": (two({"offsets": "[0,4]"}, {"offsets": "[5,9]"}), 9, None),
    "overlap": (two({"offsets": "[0,4]"}, {"offsets": "[3,7]"}), 7, None),
    "same bytes twice": (two({"offsets": "[0,4]"}, {"offsets": "[0,4]"}), 4, None),
    "empty tensor inside another": (two({"offsets": "[0,4]"}, {"shape": "[0]", "offsets": "[2,2]"}), 4, None),
    "half a byte": (one(dtype="F4", shape="[3]", offsets="[0,2]"), 2, None),
    "metadata is a list": ('{"__metadata__":[]}', 0, None),
    "metadata value is a number": ('{"__metadata__":{"a":1}}', 0, None),
    "metadata value is nested": ('{"__metadata__":{"a":{}}}', 0, None),
    "metadata value is null": ('{"__metadata__":{"a":null}}', 0, None),
    "deep": ('{"t":' + "[" * 1000 + "]" * 1000 + "}", 0, None),
    "lone surrogate": ('{"\\ud800":' + entry() + "}", 4, None),
}

# What the format forbids and the package lets pass: a name twice, where the second one would win; a header that
# does not begin with a brace; white space other than spaces after it.
STRICTER = {
    "begins with a space": (" {}", 0, None),
    "name twice": ('{"t":' + entry() + ',"t":' + entry() + "}", 4, None),
    "name twice, escaped": ('{"t":' + entry() + ',"\\u0074":' + entry() + "}", 4, None),
    "line break after it": ("{}\n", 0, None),
    "empty name": ('{"":' + entry() + "}", 4, None),
    "metadata is null": ('{"__metadata__":null}', 0, None),
}


def write(path, header, data_bytes, length):
    raw = header.encode("utf-8")
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + b"d" * data_bytes)


def check_refused(path):
    done = inspect(path)
    assert done.returncode == EXIT_FORMAT, done.stdout
    error = json.loads(done.stdout)["error"]
    assert error["category"] == "format"
    assert path.name in error["message"]
    assert path.name in done.stderr


@pytest.mark.parametrize("name", BROKEN)
def test_both_refuse(tmp_path, name):
    path = tmp_path / "model.safetensors"
    write(path, *BROKEN[name])
    with pytest.raises(safetensors.SafetensorError):
        with safetensors.safe_open(path, framework="numpy") as file:
            list(file.keys())
    check_refused(path)


@pytest.mark.parametrize("name", STRICTER)
def test_we_refuse(tmp_path, name):
    path = tmp_path / "model.safetensors"
    write(path, *STRICTER[name])
    check_refused(path)


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "model.safetensors"
    raw = b'{"\xff":' + entry().encode() + b"}"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"dddd")
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, framework="numpy")
    check_refused(path)


def test_every_truncation(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": numpy.arange(3, dtype=numpy.int16), "b": numpy.ones(2)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(path, framework="numpy")
        check_refused(path)
