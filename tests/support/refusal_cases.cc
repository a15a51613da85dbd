// SPDX-License-Identifier: Apache-2.0
#include "support/refusal_cases.h"

#include <espalier/experts.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace espalier::testing {
namespace {

ModelShape StockShape() { return {.layers = {1, 2}, .experts = 3}; }

ModelShape SlicedShape(bool shared) {
  return {.layers = {3, 4},
          .experts = 4,
          .intermediate_channels = 256,
          .slices = 2,
          .codebook = Codebook::kMcg,
          .min_bits = 3,
          .max_bits = 6,
          .bits_by_expert = true,
          .shared_hidden = shared};
}

ModelShape ContainerShape(bool per_expert) {
  return {.layers = {1, 2},
          .experts = 3,
          .bits = 3,
          .codebook = Codebook::kMcg,
          .shared_hidden = !per_expert,
          .dense = false};
}

bool ContainsAll(std::string_view text, const std::vector<std::string>& words) {
  return std::all_of(words.begin(), words.end(),
                     [&](const std::string& word) { return text.find(word) != std::string_view::npos; });
}

// A terminal would obey them.
bool HasControlCharacters(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) { return (c >= 0 && c < 0x20) || c == 0x7F; });
}

std::string ProblemText(const Problem& problem) {
  return fmt::format("{}: {} / {}: {}", problem.severity == Problem::Severity::kError ? "error" : "warning",
                     problem.file, problem.tensor, problem.message);
}

std::string ListProblems(const Checkpoint& checkpoint) {
  std::string text;
  for (const Problem& problem : checkpoint.problems()) text += "\n  " + ProblemText(problem);
  return text.empty() ? " none" : text;
}

std::string CheckProblems(const Checkpoint& checkpoint, const Expected& expected) {
  const bool want_error = expected.kind == Expected::Kind::kError;
  bool found = expected.kind == Expected::Kind::kAccepted;
  for (const Problem& problem : checkpoint.problems()) {
    const bool is_error = problem.severity == Problem::Severity::kError;
    if (HasControlCharacters(problem.message)) return "control characters in: " + problem.message;
    if (expected.kind == Expected::Kind::kAccepted || (is_error && !want_error)) {
      return "unexpected problem; problems:" + ListProblems(checkpoint);
    }
    found = found || (is_error == want_error && ContainsAll(ProblemText(problem), expected.words));
  }
  if (found) return "";
  return fmt::format("no {} with the words '{}'; problems:{}", want_error ? "error" : "warning",
                     fmt::join(expected.words, "', '"), ListProblems(checkpoint));
}

// Errors make some layer (or everything) unusable; warnings never do.
std::string CheckUsability(const Checkpoint& checkpoint, bool want_error) {
  const Result<void> usable = checkpoint.CheckUsable("");
  if (usable && want_error) return "CheckUsable succeeds in spite of an error among the problems";
  if (!usable && !want_error) return "CheckUsable fails: " + usable.error().message();
  if (!usable && usable.error().code() != StatusCode::kFormat) return "CheckUsable fails with another code";
  return "";
}

std::string CheckMarkers(const Checkpoint& checkpoint, const Expected& expected) {
  for (size_t layer = 0; layer < checkpoint.layers().size(); ++layer) {
    const MoeLayer& info = checkpoint.layers()[layer];
    for (uint32_t e = 0; e < info.experts; ++e) {
      for (int p = info.has_gate ? 0 : 1; p < kNumProjections; ++p) {
        for (uint32_t s = 0; s < info.slices; ++s) {
          const Result<void> marker =
              checkpoint.CheckMarker(checkpoint.Matrix(layer, e, static_cast<Projection>(p), s));
          if (marker) continue;
          const Result<PreparedExperts> loaded = LoadExperts(checkpoint, layer);
          if (loaded) return "CheckMarker fails, but LoadExperts succeeds";
          for (const Status& status : {marker.error(), loaded.error()}) {
            if (status.code() != StatusCode::kFormat || !ContainsAll(status.message(), expected.words)) {
              return fmt::format("{}: {}", StatusCodeName(status.code()), status.message());
            }
          }
          return "";
        }
      }
    }
  }
  return "no marker was refused";
}

std::string CheckPaddings(const Checkpoint& checkpoint, const Expected& expected) {
  for (size_t layer = 0; layer < checkpoint.layers().size(); ++layer) {
    const MoeLayer& info = checkpoint.layers()[layer];
    const Result<void> padding = checkpoint.CheckPadding(
        layer, {.slice = 0, .first_channel = 0, .channels = info.intermediate_channels / info.slices});
    if (padding) continue;
    if (padding.error().code() == StatusCode::kFormat &&
        ContainsAll(padding.error().message(), expected.words)) {
      return "";
    }
    return fmt::format("{}: {}", StatusCodeName(padding.error().code()), padding.error().message());
  }
  return "no padding was refused";
}

}  // namespace

MemoryCheckpoint OpenInMemory(const FileMap& files, const std::string& path) {
  auto file_system = std::make_unique<MemoryFileSystem>();
  for (const auto& [name, bytes] : files) file_system->Write("/ckpt/" + name, bytes);
  OpenOptions options;
  options.file_system = file_system.get();
  Result<Checkpoint> checkpoint = Checkpoint::Open(path.empty() ? "/ckpt" : "/ckpt/" + path, options);
  return {std::move(file_system), std::move(checkpoint)};
}

CheckpointFiles MakeBase(Base base) {
  switch (base) {
    case Base::kStock:
      return WriteStock(RandomModel(StockShape(), 1), {.shards = 2, .index = true, .spread = true});
    case Base::kStockSingle:
      return WriteStock(RandomModel(StockShape(), 1));
    case Base::kStockShards:
      return WriteStock(RandomModel(StockShape(), 1), {.shards = 3});
    case Base::kLegacy: {
      ModelShape shape = StockShape();
      shape.unit_signs = true;
      return WriteStock(RandomModel(shape, 2), {.legacy_signs = true});
    }
    case Base::kBias: {
      ModelShape shape = StockShape();
      shape.bias = true;
      return WriteStock(RandomModel(shape, 3));
    }
    case Base::kRankSliced:
      return WriteRankSliced(RandomModel(SlicedShape(false), 4));
    case Base::kSharedH:
      return WriteRankSliced(RandomModel(SlicedShape(true), 5), {.shared_h = true, .index = true});
    case Base::kR7: {
      ModelShape shape = SlicedShape(true);
      shape.slices = 1;
      shape.bits_by_expert = false;
      shape.same_gate_up_suh = true;
      return WriteR7(RandomModel(shape, 6));
    }
    case Base::kExl3V1:
      return WriteExl3V1(RandomModel(ContainerShape(false), 7));
    case Base::kExl3V1PerExpert:
      return WriteExl3V1(RandomModel(ContainerShape(true), 8), {.per_expert_vectors = true});
  }
  return {};
}

const std::vector<Base>& AllBases() {
  static const std::vector<Base> bases = {
      Base::kStock,      Base::kStockSingle, Base::kStockShards, Base::kLegacy, Base::kBias,
      Base::kRankSliced, Base::kSharedH,     Base::kR7,          Base::kExl3V1, Base::kExl3V1PerExpert};
  return bases;
}

std::string BaseName(Base base) {
  static const char* const names[] = {"stock",   "stock_single",      "stock_shards", "legacy",
                                      "bias",    "rank_sliced",       "shared_h",     "r7",
                                      "exl3_v1", "exl3_v1_per_expert"};
  return names[static_cast<int>(base)];
}

Expected Refused(std::vector<StatusCode> codes, std::vector<std::string> words) {
  return {Expected::Kind::kRefused, std::move(codes), std::move(words)};
}
Expected Format(std::vector<std::string> words) { return Refused({StatusCode::kFormat}, std::move(words)); }
Expected Unsupported(std::vector<std::string> words) {
  return Refused({StatusCode::kUnsupported}, std::move(words));
}
Expected ErrorProblem(std::vector<std::string> words) {
  return {Expected::Kind::kError, {}, std::move(words)};
}
Expected Warning(std::vector<std::string> words) { return {Expected::Kind::kWarning, {}, std::move(words)}; }
Expected Accepted() { return {Expected::Kind::kAccepted, {}, {}}; }

// Gives a tensor another dtype and shape, with as many bytes as they need.
Mutation Retype(std::string name, std::string dtype, std::vector<uint64_t> shape, uint64_t element_bytes) {
  return [=](CheckpointFiles& files) {
    NamedTensor& tensor = files.Tensor(name);
    uint64_t count = 1;
    for (uint64_t extent : shape) count *= extent;
    tensor.dtype = dtype;
    tensor.shape = shape;
    tensor.data.resize(count * element_bytes);
  };
}

Mutation Without(std::vector<std::string> names) {
  return [=](CheckpointFiles& files) {
    for (const std::string& name : names) files.Remove(name);
  };
}

// Removes every tensor whose name begins with `prefix`.
Mutation WithoutAll(std::string prefix) {
  return [=](CheckpointFiles& files) {
    std::vector<std::string> names;
    for (const auto& [file, shard] : files.shards) {
      for (const NamedTensor& tensor : shard.tensors) {
        if (tensor.name.starts_with(prefix)) names.push_back(tensor.name);
      }
    }
    if (names.empty()) throw std::out_of_range(prefix);
    for (const std::string& name : names) files.Remove(name);
  };
}

Mutation RenameAll(std::string from, std::string to) {
  return [=](CheckpointFiles& files) {
    std::vector<std::string> names;
    for (const auto& [file, shard] : files.shards) {
      for (const NamedTensor& tensor : shard.tensors) {
        if (tensor.name.find(from) != std::string::npos) names.push_back(tensor.name);
      }
    }
    if (names.empty()) throw std::out_of_range(from);
    for (const std::string& name : names) {
      std::string renamed = name;
      files.Rename(name, renamed.replace(renamed.find(from), from.size(), to));
    }
  };
}

Mutation AddTensor(std::string near, NamedTensor tensor) {
  return [=](CheckpointFiles& files) { files.Add(files.FileOf(near), tensor); };
}

Mutation SetJson(std::string file, std::string pointer, Json value) {
  return [=](CheckpointFiles& files) { files.json.at(file)[Json::json_pointer(pointer)] = value; };
}

Mutation EraseJson(std::string file, std::string pointer) {
  return [=](CheckpointFiles& files) {
    const Json::json_pointer at(pointer);
    Json& parent = files.json.at(file)[at.parent_pointer()];
    if (!parent.contains(at.back())) throw std::out_of_range(pointer);
    parent.erase(at.back());
  };
}

Mutation Both(Mutation first, Mutation second) {
  return [=](CheckpointFiles& files) {
    first(files);
    second(files);
  };
}

std::ostream& operator<<(std::ostream& out, const RefusalCase& refusal_case) {
  return out << refusal_case.name;
}

std::string RunCase(const RefusalCase& refusal_case) {
  CheckpointFiles files = MakeBase(refusal_case.base);
  refusal_case.mutate(files);
  const MemoryCheckpoint opened = OpenInMemory(files.Serialize());
  const Expected& expected = refusal_case.expected;
  if (!opened.checkpoint) {
    const Status& status = opened.checkpoint.error();
    const std::string text = fmt::format("{}: {}", StatusCodeName(status.code()), status.message());
    if (expected.kind != Expected::Kind::kRefused) return "refused: " + text;
    if (HasControlCharacters(text)) return "control characters in: " + text;
    if (text.size() > 5000) return "a message of " + std::to_string(text.size()) + " bytes";
    if (std::find(expected.codes.begin(), expected.codes.end(), status.code()) == expected.codes.end()) {
      return "another code: " + text;
    }
    if (!ContainsAll(status.message(), expected.words)) {
      return fmt::format("the words '{}' are not all in: {}", fmt::join(expected.words, "', '"), text);
    }
    return "";
  }
  const Checkpoint& checkpoint = *opened.checkpoint;
  switch (expected.kind) {
    case Expected::Kind::kRefused:
      return "opened, but should have been refused; problems:" + ListProblems(checkpoint);
    case Expected::Kind::kMarker:
      return CheckMarkers(checkpoint, expected);
    case Expected::Kind::kPadding:
      return CheckPaddings(checkpoint, expected);
    case Expected::Kind::kError:
    case Expected::Kind::kWarning:
    case Expected::Kind::kAccepted:
      break;
  }
  const std::string problems = CheckProblems(checkpoint, expected);
  return problems.empty() ? CheckUsability(checkpoint, expected.kind == Expected::Kind::kError) : problems;
}

}  // namespace espalier::testing
