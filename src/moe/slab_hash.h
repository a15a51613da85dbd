// SPDX-License-Identifier: Apache-2.0
//
// The pieces in which a slab is read and hashed, and its memory.
#ifndef ESPALIER_SRC_MOE_SLAB_HASH_H_
#define ESPALIER_SRC_MOE_SLAB_HASH_H_

#include <espalier/experts.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace espalier {

// Whole rows of tiles of one matrix: what one thread reads at a time.
struct CodePiece {
  size_t matrix = 0;        // position in the list
  uint64_t first_byte = 0;  // inside the codes of the matrix
  uint64_t size_bytes = 0;
};

// In the order of the matrices, none larger than 4 MiB unless a single row of tiles is: large enough that a
// read costs more than its call, small enough to share a layer evenly.
std::vector<CodePiece> CodePieces(std::span<const MatrixDesc> matrices);

// Every matrix of a table: by segment, then by projection.
std::vector<MatrixDesc> PresentMatrices(const ExpertsTable& table);

// Hash of the package: of a text that gives, for every matrix, its shape, rate, codebook and the hashes of
// its pieces and vectors. `piece_hashes` is parallel to CodePieces(PresentMatrices(table)). Gaps of the slab
// do not count, nor does whether equal vectors share a place. Error: kDevice.
Result<std::string> HashTable(const ExpertsTable& table, std::span<const std::string> piece_hashes,
                              const DeviceBuffer& slab);

// All of it, for codes in host memory: `codes` is parallel to PresentMatrices(table).
Result<std::string> HashSlab(const ExpertsTable& table, std::span<const std::byte* const> codes,
                             const DeviceBuffer& slab, int num_threads);

// A slab on options.device, or from options.allocate. Errors: kCapacity, kDevice; kUsage when the caller's
// allocator gives too little or unaligned memory, or memory of the host for a GPU.
Result<DeviceBuffer> AllocateSlab(uint64_t size_bytes, const std::string& identity,
                                  const LoadOptions& options);

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_SLAB_HASH_H_
