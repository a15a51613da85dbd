// SPDX-License-Identifier: Apache-2.0
//
// The function between FC1 and FC2 (docs/format.md, section 5.3). NaN in, NaN out; a finite argument
// of any size never makes one.
#ifndef ESPALIER_SRC_REFERENCE_ACTIVATION_H_
#define ESPALIER_SRC_REFERENCE_ACTIVATION_H_

#include <espalier/formats.h>

#include <cmath>

namespace espalier {

// The exponential is taken of -|z| only: it never overflows, so no inf / inf.
template <typename Real>
Real Sigmoid(Real z) {
  const Real e = std::exp(-std::abs(z));
  return (z >= 0 ? Real{1} : e) / (1 + e);
}

// Comparisons that are false for NaN leave it as it is.
template <typename Real>
Real ClampAbove(Real v, Real limit) {
  return v > limit ? limit : v;
}

template <typename Real>
Real ClampBoth(Real v, Real limit) {
  return v < -limit ? -limit : ClampAbove(v, limit);
}

template <typename Real>
Real GeluTanh(Real g) {
  const Real inner = static_cast<Real>(0.797884560803) * (g + static_cast<Real>(0.044715) * g * g * g);
  return static_cast<Real>(0.5) * g * (1 + std::tanh(inner));
}

// `gate` is ignored where the activation has none.
template <typename Real>
Real Activate(const Activation& activation, Real gate, Real up) {
  if (activation.limit > 0) {
    const Real limit = static_cast<Real>(activation.limit);
    gate = ClampAbove(gate, limit);
    up = ClampBoth(up, limit);
  }
  switch (activation.kind) {
    case ActivationKind::kSilu:
      return gate * Sigmoid(gate) * up;
    case ActivationKind::kGelu:
      return GeluTanh(gate) * up;
    case ActivationKind::kRelu2: {
      const Real positive = up < 0 ? Real{0} : up;
      return positive * positive;
    }
    case ActivationKind::kSitu: {
      const Real beta = static_cast<Real>(activation.beta);
      const Real linear_beta = static_cast<Real>(activation.linear_beta);
      const Real value = activation.linear_beta > 0 ? linear_beta * std::tanh(up / linear_beta) : up;
      return beta * std::tanh(gate / beta) * Sigmoid(gate) * value;  // the sigmoid takes the raw gate
    }
    case ActivationKind::kSwigluOai:
      // In this order: (up + 1) * gate may overflow, and infinity times a sigmoid of 0 is NaN.
      return gate * Sigmoid(static_cast<Real>(1.702) * gate) * (up + 1);
  }
  return up;
}

}  // namespace espalier

#endif  // ESPALIER_SRC_REFERENCE_ACTIVATION_H_
