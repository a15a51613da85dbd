// SPDX-License-Identifier: Apache-2.0
#ifndef ESPALIER_SRC_BASE_SHA256_H_
#define ESPALIER_SRC_BASE_SHA256_H_

#include <espalier/status.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace espalier {

// Streaming SHA-256 over OpenSSL's EVP.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(std::span<const std::byte> bytes);
  // Lower-case hex. The object is used up.
  std::string FinishHex();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string Sha256Hex(std::span<const std::byte> bytes);

}  // namespace espalier

#endif  // ESPALIER_SRC_BASE_SHA256_H_
