// SPDX-License-Identifier: Apache-2.0
#include "base/sha256.h"

#include <openssl/evp.h>

namespace espalier {

// Null when OpenSSL could not set up the digest; FinishHex then returns "", which equals no digest.
struct Sha256::Context {
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> digest;
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  context_->digest.reset(EVP_MD_CTX_new());
  if (context_->digest != nullptr && EVP_DigestInit_ex(context_->digest.get(), EVP_sha256(), nullptr) != 1) {
    context_->digest.reset();
  }
}

Sha256::~Sha256() = default;

void Sha256::Update(std::span<const std::byte> bytes) {
  if (context_->digest == nullptr) return;
  if (EVP_DigestUpdate(context_->digest.get(), bytes.data(), bytes.size()) != 1) context_->digest.reset();
}

std::string Sha256::FinishHex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  if (context_->digest == nullptr || EVP_DigestFinal_ex(context_->digest.get(), digest, &length) != 1)
    return {};
  context_->digest.reset();
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (unsigned int i = 0; i < length; ++i) {
    hex += kDigits[digest[i] >> 4];
    hex += kDigits[digest[i] & 15];
  }
  return hex;
}

std::string Sha256Hex(std::span<const std::byte> bytes) {
  Sha256 sha;
  sha.Update(bytes);
  return sha.FinishHex();
}

}  // namespace espalier
