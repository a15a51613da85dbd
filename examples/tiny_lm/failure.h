// SPDX-License-Identifier: Apache-2.0
//
// The library returns Result<T> and never throws. This program turns an error into an exception of its own
// at the call, as an engine would turn it into whatever it uses; main() makes an exit code of it.
#ifndef ESPALIER_EXAMPLES_TINY_LM_FAILURE_H_
#define ESPALIER_EXAMPLES_TINY_LM_FAILURE_H_

#include <espalier/espalier.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

namespace tiny_lm {

class Failure : public std::exception {
 public:
  explicit Failure(espalier::Status status) : status_(std::move(status)) {}
  Failure(espalier::StatusCode code, std::string message) : status_(code, std::move(message)) {}
  const espalier::Status& status() const { return status_; }
  const char* what() const noexcept override { return status_.message().c_str(); }

 private:
  espalier::Status status_;
};

template <typename T>
T Value(espalier::Result<T> result) {
  if (!result) throw Failure(std::move(result.error()));
  if constexpr (!std::is_void_v<T>) return *std::move(result);
}

inline std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::error_code ignored;  // a directory can be opened, and reading it throws
  const bool readable = in.is_open() && !std::filesystem::is_directory(path, ignored);
  std::string text;
  if (readable) text.assign(std::istreambuf_iterator<char>(in), {});
  if (!readable || in.bad()) throw Failure(espalier::StatusCode::kIo, path.string() + ": cannot be read");
  return text;
}

// parse(root of the JSON file). Failures of `parse` get the file's name; a key that is missing or of another
// type is kFormat.
template <typename Parse>
auto ReadJson(const std::filesystem::path& path, const Parse& parse) {
  const std::string text = ReadFile(path);
  try {
    return parse(nlohmann::json::parse(text));
  } catch (const nlohmann::json::exception& e) {
    throw Failure(espalier::StatusCode::kFormat, path.string() + ": " + e.what());
  } catch (const Failure& e) {
    throw Failure(e.status().code(), path.string() + ": " + e.what());
  }
}

}  // namespace tiny_lm

#endif  // ESPALIER_EXAMPLES_TINY_LM_FAILURE_H_
