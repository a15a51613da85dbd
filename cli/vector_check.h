// SPDX-License-Identifier: Apache-2.0
//
// Are the scale vectors and biases of EXL3 matrices finite, and zero where a model is padded.
#ifndef ESPALIER_CLI_VECTOR_CHECK_H_
#define ESPALIER_CLI_VECTOR_CHECK_H_

#include <espalier/checkpoint.h>
#include <espalier/status.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string_view>
#include <tuple>
#include <vector>

namespace espalier::cli {

class VectorCheck {
 public:
  // Findings are appended to `problems`. Both must outlive this.
  VectorCheck(const Checkpoint& checkpoint, std::vector<Problem>& problems)
      : checkpoint_(checkpoint), problems_(problems) {}

  // suh, svh and bias of every matrix of a layer: an error per vector with NaN or inf, one warning
  // when an svh is not 0 in padding. Errors: kIo.
  Result<void> CheckLayer(size_t layer);

  // The same for every dense matrix, whose markers are checked too. Errors: kIo, kFormat.
  Result<void> CheckLinears();

  bool found_error() const { return found_error_; }

 private:
  Result<void> CheckMatrix(size_t layer, uint32_t expert, Projection projection, uint32_t slice);
  Result<void> CheckVector(const VectorSource& vector, uint64_t channels, std::string_view layer);
  // The vector as stored, or nothing when it has been read before or has no numbers.
  Result<bool> ReadVector(const VectorSource& vector, uint64_t channels);
  void ReportPadding(size_t layer);

  // Counts the non-zero values of the vector just read from `first` on.
  void CountPadding(const VectorSource& vector, uint64_t first);

  struct Place {
    uint32_t file = 0;
    std::string_view tensor;
    uint64_t element = 0;
  };
  // Where element `channel` of a vector is stored.
  Place Locate(const VectorSource& vector, uint64_t channel) const;

  const Checkpoint& checkpoint_;
  std::vector<Problem>& problems_;
  std::set<std::tuple<uint64_t, uint32_t, uint64_t, uint64_t>> seen_;
  std::vector<uint16_t> values_;  // of the vector just read
  uint64_t num_padded_vectors_ = 0;
  Place first_padded_;
  bool found_error_ = false;
};

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_VECTOR_CHECK_H_
