// SPDX-License-Identifier: Apache-2.0
//
// A rectangle of a stored matrix as a matrix of its own.
#ifndef ESPALIER_SRC_MOE_MATRIX_PART_H_
#define ESPALIER_SRC_MOE_MATRIX_PART_H_

#include <espalier/experts.h>

namespace espalier {

// The byte ranges of `extent` of a matrix: targets are those of the part, and no byte outside it is named.
// Cost: linear in the regions. Error: kGeometry, with the legal channels. REQUIRES: a source in native order
// whose sides are multiples of 128 and below 2^32.
Result<MatrixSource> CutMatrix(MatrixSource whole, const LinearExtent& extent);

}  // namespace espalier

#endif  // ESPALIER_SRC_MOE_MATRIX_PART_H_
