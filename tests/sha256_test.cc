// SPDX-License-Identifier: Apache-2.0
#include "base/sha256.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace espalier {
namespace {

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

// The examples of FIPS 180-4.
TEST(Sha256Test, PublishedVectors) {
  EXPECT_EQ(Sha256Hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex(Bytes("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Hex(Bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256Hex(Bytes(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256Test, PiecesGiveTheDigestOfTheWhole) {
  const std::string text(10000, 'x');
  for (const size_t piece : {1, 7, 64, 4096, 10000}) {
    Sha256 sha;
    for (size_t i = 0; i < text.size(); i += piece) {
      sha.Update(Bytes(text).subspan(i, std::min(piece, text.size() - i)));
    }
    EXPECT_EQ(sha.FinishHex(), Sha256Hex(Bytes(text))) << piece;
  }
}

}  // namespace
}  // namespace espalier
