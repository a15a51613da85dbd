// SPDX-License-Identifier: Apache-2.0
//
// espalier compare: how far the tensors of one safetensors file lie from those of another.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/half.h"
#include "checkpoint/safetensors.h"
#include "command.h"
#include "metrics.h"

namespace espalier::cli {
namespace {

// A multiple of 3, so that a chunk of packed 6-bit elements (4 in 3 bytes) ends on a whole one, and
// of 8, the largest element.
constexpr uint64_t kChunkBytes = uint64_t{3} << 20;
constexpr size_t kMaxTensorLines = 40;

struct CompareOptions {
  std::string a;
  std::string b;
  double max_rel_l2 = 0;
};

struct SafetensorsFile {
  std::unique_ptr<File> file;
  std::map<std::string, TensorInfo> tensors;
};

Result<SafetensorsFile> OpenFile(const std::string& path) {
  Result<std::unique_ptr<File>> file = PosixFileSystem().Open(path);
  if (!file) return tl::unexpected(file.error());
  Result<SafetensorsHeader> header = ReadSafetensorsHeader(**file);
  if (!header) return tl::unexpected(header.error());
  SafetensorsFile opened;
  opened.file = *std::move(file);
  for (TensorInfo& tensor : header->tensors) {
    std::string name = tensor.name;
    opened.tensors.emplace(std::move(name), std::move(tensor));
  }
  return opened;
}

template <typename T>
T Load(const std::byte* data, uint64_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

// How the exponent field of all ones, or the sign bit alone, is read.
enum class Special { kNone, kAllOnesNan, kIeee, kNegativeZeroNan };

// Sign, exponent and mantissa of an element of at most 8 bits.
double Minifloat(unsigned code, int exponent_bits, int mantissa_bits, int bias, Special special) {
  const unsigned exponent = (code >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const unsigned mantissa = code & ((1u << mantissa_bits) - 1);
  const bool negative = ((code >> (exponent_bits + mantissa_bits)) & 1) != 0;
  const bool top_exponent = exponent == (1u << exponent_bits) - 1;
  const bool top_mantissa = mantissa == (1u << mantissa_bits) - 1;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  if (special == Special::kAllOnesNan && top_exponent && top_mantissa) return kNan;
  if (special == Special::kNegativeZeroNan && negative && exponent == 0 && mantissa == 0) return kNan;
  double magnitude = 0;
  if (special == Special::kIeee && top_exponent) {
    if (mantissa != 0) return kNan;
    magnitude = std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude =
        std::ldexp(mantissa + (1u << mantissa_bits), static_cast<int>(exponent) - bias - mantissa_bits);
  }
  return negative ? -magnitude : magnitude;
}

// Element `index` of a little-endian bit stream of `bits`-bit elements.
unsigned PackedElement(const std::byte* data, uint64_t index, unsigned bits) {
  unsigned value = 0;
  for (unsigned i = 0; i < bits; ++i) {
    const uint64_t bit = index * bits + i;
    value |= ((std::to_integer<unsigned>(data[bit / 8]) >> (bit % 8)) & 1u) << i;
  }
  return value;
}

double ElementValue(Dtype dtype, const std::byte* data, uint64_t index) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kU8:
      return Load<uint8_t>(data, index);
    case Dtype::kI8:
      return Load<int8_t>(data, index);
    case Dtype::kI16:
      return Load<int16_t>(data, index);
    case Dtype::kU16:
      return Load<uint16_t>(data, index);
    case Dtype::kF16:
      return Fp16ToFloat(Load<uint16_t>(data, index));
    case Dtype::kBF16:
      return Bf16ToFloat(Load<uint16_t>(data, index));
    case Dtype::kI32:
      return Load<int32_t>(data, index);
    case Dtype::kU32:
      return Load<uint32_t>(data, index);
    case Dtype::kF32:
    case Dtype::kC64:  // two of them
      return Load<float>(data, index);
    case Dtype::kF64:
      return Load<double>(data, index);
    case Dtype::kI64:
      return static_cast<double>(Load<int64_t>(data, index));
    case Dtype::kU64:
      return static_cast<double>(Load<uint64_t>(data, index));
    case Dtype::kF8E4M3:
      return Minifloat(Load<uint8_t>(data, index), 4, 3, 7, Special::kAllOnesNan);
    case Dtype::kF8E5M2:
      return Minifloat(Load<uint8_t>(data, index), 5, 2, 15, Special::kIeee);
    case Dtype::kF8E4M3Fnuz:
      return Minifloat(Load<uint8_t>(data, index), 4, 3, 8, Special::kNegativeZeroNan);
    case Dtype::kF8E5M2Fnuz:
      return Minifloat(Load<uint8_t>(data, index), 5, 2, 16, Special::kNegativeZeroNan);
    case Dtype::kF8E8M0: {
      const auto code = Load<uint8_t>(data, index);
      return code == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, code - 127);
    }
    case Dtype::kF4:
      return Minifloat(PackedElement(data, index, 4), 2, 1, 1, Special::kNone);
    case Dtype::kF6E2M3:
      return Minifloat(PackedElement(data, index, 6), 2, 3, 1, Special::kNone);
    case Dtype::kF6E3M2:
      return Minifloat(PackedElement(data, index, 6), 3, 2, 3, Special::kNone);
  }
  return 0;
}

// Elements of `bytes` whole bytes; a complex number counts as two.
uint64_t ElementsIn(Dtype dtype, uint64_t bytes) {
  const int bits = dtype == Dtype::kC64 ? 32 : DtypeBits(dtype);
  return bytes * 8 / static_cast<uint64_t>(bits);
}

// a - b rounded once: neighbours above 2^53 are different integers and the same double.
template <typename T>
double IntegerDifference(T a, T b) {
  const auto distance = a > b ? static_cast<uint64_t>(a) - static_cast<uint64_t>(b)
                              : static_cast<uint64_t>(b) - static_cast<uint64_t>(a);
  const auto magnitude = static_cast<double>(distance);
  return a > b ? magnitude : -magnitude;
}

void AddChunk(Dtype dtype, const std::byte* a, const std::byte* b, uint64_t elements, MetricsSum& sum) {
  for (uint64_t i = 0; i < elements; ++i) {
    const double value = ElementValue(dtype, a, i);
    const double reference = ElementValue(dtype, b, i);
    if (dtype == Dtype::kI64) {
      sum.Add(value, reference, IntegerDifference(Load<int64_t>(a, i), Load<int64_t>(b, i)));
    } else if (dtype == Dtype::kU64) {
      sum.Add(value, reference, IntegerDifference(Load<uint64_t>(a, i), Load<uint64_t>(b, i)));
    } else {
      sum.Add(value, reference);
    }
  }
}

std::string ShapeText(const TensorInfo& tensor) {
  return fmt::format("{} [{}]", DtypeName(tensor.dtype), fmt::join(tensor.shape, ", "));
}

class Comparison {
 public:
  Comparison(const SafetensorsFile& a, const SafetensorsFile& b) : a_(a), b_(b) {
    for (const auto& [name, tensor] : a.tensors) bytes_total_ += tensor.size_bytes;
  }

  Result<Metrics> CompareTensor(const TensorInfo& a, const TensorInfo& b) {
    MetricsSum sum;
    for (uint64_t offset = 0; offset < a.size_bytes; offset += kChunkBytes) {
      const uint64_t bytes = std::min(kChunkBytes, a.size_bytes - offset);
      chunk_a_.resize(bytes);
      chunk_b_.resize(bytes);
      if (auto read = a_.file->ReadAt(a.offset_bytes + offset, chunk_a_); !read) {
        return tl::unexpected(read.error());
      }
      if (auto read = b_.file->ReadAt(b.offset_bytes + offset, chunk_b_); !read) {
        return tl::unexpected(read.error());
      }
      AddChunk(a.dtype, chunk_a_.data(), chunk_b_.data(), ElementsIn(a.dtype, bytes), sum);
      bytes_done_ += bytes;
      progress_.Update(bytes_done_, bytes_total_);
    }
    return sum.Result();
  }

 private:
  const SafetensorsFile& a_;
  const SafetensorsFile& b_;
  std::vector<std::byte> chunk_a_;
  std::vector<std::byte> chunk_b_;
  uint64_t bytes_done_ = 0;
  uint64_t bytes_total_ = 0;
  Progress progress_{"comparing"};
};

struct ComparedTensor {
  std::string name;
  Metrics metrics;
  bool ok = false;
};

struct Difference {
  std::string name;
  std::string message;
};

// What keeps two tensors from being compared, and those that only one file has.
std::vector<Difference> FindDifferences(const SafetensorsFile& a, const SafetensorsFile& b) {
  std::vector<Difference> differences;
  for (const auto& [name, tensor] : a.tensors) {
    const auto other = b.tensors.find(name);
    if (other == b.tensors.end()) {
      differences.push_back({name, "only in the first file"});
    } else if (tensor.dtype != other->second.dtype || tensor.shape != other->second.shape) {
      differences.push_back({name, fmt::format("{} in the first file, {} in the second", ShapeText(tensor),
                                               ShapeText(other->second))});
    }
  }
  for (const auto& [name, tensor] : b.tensors) {
    if (!a.tensors.contains(name)) differences.push_back({name, "only in the second file"});
  }
  return differences;
}

void PrintComparison(Output& output, const std::vector<ComparedTensor>& tensors,
                     const std::vector<Difference>& differences, double bound) {
  size_t failed = differences.size();
  size_t width = 6;
  for (const ComparedTensor& tensor : tensors) {
    failed += tensor.ok ? 0 : 1;
    width = std::max(width, std::min<size_t>(tensor.name.size(), 60));
  }
  output.Print("{:<{}}  {:>11}  {:>14}  {:>11}\n", "tensor", width, "rel_l2", "cosine", "max_abs");
  // Of very many tensors, those that are out of bounds matter.
  const bool failed_only = tensors.size() > kMaxTensorLines;
  size_t lines = 0;
  for (const ComparedTensor& tensor : tensors) {
    if (failed_only && (tensor.ok || lines >= kMaxTensorLines)) continue;
    ++lines;
    output.Print("{:<{}}  {:>11.4g}  {:>14.10f}  {:>11.4g}{}\n", tensor.name, width, tensor.metrics.rel_l2,
                 tensor.metrics.cosine, tensor.metrics.max_abs, tensor.ok ? "" : "  above the bound");
  }
  for (size_t i = 0; i < std::min(differences.size(), kMaxTensorLines); ++i) {
    output.Print("{}: {}\n", differences[i].name, differences[i].message);
  }
  output.Print("{}: {} tensors compared, {} failed, bound {:g}\n", failed == 0 ? "ok" : "FAILED",
               tensors.size(), failed, bound);
}

Result<int> Compare(const CompareOptions& options, Output& output) {
  if (!(options.max_rel_l2 >= 0)) return Error(StatusCode::kUsage, "--max-rel-l2 must not be negative");
  const Result<SafetensorsFile> a = OpenFile(options.a);
  if (!a) return tl::unexpected(a.error());
  const Result<SafetensorsFile> b = OpenFile(options.b);
  if (!b) return tl::unexpected(b.error());
  const std::vector<Difference> differences = FindDifferences(*a, *b);

  std::vector<ComparedTensor> tensors;
  Json tensor_json = Json::array();
  bool ok = differences.empty();
  {
    Comparison comparison(*a, *b);
    for (const auto& [name, tensor] : a->tensors) {
      const auto other = b->tensors.find(name);
      if (other == b->tensors.end() || tensor.dtype != other->second.dtype ||
          tensor.shape != other->second.shape) {
        continue;
      }
      const Result<Metrics> metrics = comparison.CompareTensor(tensor, other->second);
      if (!metrics) return tl::unexpected(metrics.error());
      const bool tensor_ok = metrics->rel_l2 <= options.max_rel_l2;
      ok = ok && tensor_ok;
      tensors.push_back({name, *metrics, tensor_ok});
      tensor_json.push_back({{"name", name},
                             {"rel_l2", metrics->rel_l2},
                             {"cosine", metrics->cosine},
                             {"max_abs", metrics->max_abs},
                             {"ok", tensor_ok}});
    }
  }
  Json difference_json = Json::array();
  for (const Difference& difference : differences) {
    difference_json.push_back({{"name", difference.name}, {"message", difference.message}});
  }
  PrintComparison(output, tensors, differences, options.max_rel_l2);
  output.Document({{"schema", "espalier.compare/1"},
                   {"tensors", tensor_json},
                   {"differences", difference_json},
                   {"max_rel_l2", options.max_rel_l2},
                   {"ok", ok}});
  return ok ? kExitOk : kExitCheckFailed;
}

}  // namespace

void AddCompare(CLI::App& app, Invocation& invocation) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* command = AddCommand(
      app, invocation, "compare", "Compare the tensors of two safetensors files",
      "Per tensor: relative L2 error and cosine against B, largest absolute difference. Exit 1 when a\n"
      "tensor lies above the bound, or when names, shapes or dtypes differ.\n"
      "\n"
      "Example:\n"
      "  espalier compare y.safetensors expected.safetensors --max-rel-l2 2e-6\n");
  command->add_option("A", options->a, "A safetensors file")->required();
  command->add_option("B", options->b, "The safetensors file that A is measured against")->required();
  command->add_option("--max-rel-l2", options->max_rel_l2, "Largest relative L2 error that passes")
      ->capture_default_str();
  command->callback([options, &invocation] {
    invocation.run = [options](Output& output) { return Compare(*options, output); };
  });
}

}  // namespace espalier::cli
