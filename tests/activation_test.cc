// SPDX-License-Identifier: Apache-2.0
#include "reference/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace espalier {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Plain(const Activation& a, double g, double u) {
  const auto sigma = [](double z) { return 1 / (1 + std::exp(-z)); };
  if (a.limit > 0) {
    g = std::min(g, a.limit);
    u = std::min(std::max(u, -a.limit), a.limit);
  }
  switch (a.kind) {
    case ActivationKind::kSilu:
      return g * sigma(g) * u;
    case ActivationKind::kGelu:
      return 0.5 * g * (1 + std::tanh(0.797884560803 * (g + 0.044715 * std::pow(g, 3)))) * u;
    case ActivationKind::kRelu2:
      return std::pow(std::max(u, 0.0), 2);
    case ActivationKind::kSitu:
      return a.beta * std::tanh(g / a.beta) * sigma(g) *
             (a.linear_beta > 0 ? a.linear_beta * std::tanh(u / a.linear_beta) : u);
    case ActivationKind::kSwigluOai:
      return (u + 1) * g * sigma(1.702 * g);
  }
  return 0;
}

std::vector<Activation> AllActivations() {
  std::vector<Activation> activations;
#define ESPALIER_ACTIVATION(enumerator, number, name, has_gate, num_parameters) \
  activations.push_back({.kind = ActivationKind::enumerator});
#include <espalier/formats.def>
  activations.push_back({.kind = ActivationKind::kSilu, .limit = 1.5});
  activations.push_back({.kind = ActivationKind::kGelu, .limit = 1.5});
  activations.push_back({.kind = ActivationKind::kSwigluOai, .limit = 7});
  activations.push_back({.kind = ActivationKind::kSitu, .beta = 2, .linear_beta = 0});
  return activations;
}

TEST(Activation, FormulasOfTheFormat) {
  for (const Activation& activation : AllActivations()) {
    for (double g = -9; g <= 9; g += 0.75) {
      for (double u = -9; u <= 9; u += 0.75) {
        const double expected = Plain(activation, g, u);
        ASSERT_NEAR(Activate(activation, g, u), expected, 1e-13 * (1 + std::abs(expected)))
            << ActivationText(activation) << " of " << g << ", " << u;
        const float single = Activate(activation, static_cast<float>(g), static_cast<float>(u));
        ASSERT_NEAR(single, expected, 2e-6 * (1 + std::abs(expected))) << ActivationText(activation);
      }
    }
  }
}

template <typename Real>
void ExpectNoNan() {
  const Real largest = std::numeric_limits<Real>::max();
  const Real sizes[] = {0, 1e-30f, 1, 80, 100, 1000, 1e10f, 1e20f, 1e30f, largest};
  for (const Activation& activation : AllActivations()) {
    for (const Real a : sizes) {
      for (const Real b : sizes) {
        for (const Real g : {a, -a}) {
          for (const Real u : {b, -b}) {
            ASSERT_FALSE(std::isnan(Activate(activation, g, u)))
                << ActivationText(activation) << " of " << g << ", " << u;
          }
        }
      }
    }
  }
}

TEST(Activation, FiniteArgumentsNeverGiveNan) {
  ExpectNoNan<float>();
  ExpectNoNan<double>();
}

TEST(Activation, NanPassesThroughLimits) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Activation& activation : AllActivations()) {
    EXPECT_TRUE(std::isnan(Activate(activation, 1.0, nan))) << ActivationText(activation);
    if (ActivationHasGate(activation.kind)) {
      EXPECT_TRUE(std::isnan(Activate(activation, nan, 1.0))) << ActivationText(activation);
    }
  }
}

TEST(Activation, LimitsComeFirst) {
  const Activation silu = {.kind = ActivationKind::kSilu, .limit = 2};
  EXPECT_EQ(Activate(silu, 100.0, 100.0), Activate(silu, 2.0, 2.0));
  EXPECT_EQ(Activate(silu, 1.0, -100.0), Activate(silu, 1.0, -2.0));
  // The gate has no lower limit.
  EXPECT_NE(Activate(silu, -3.0, 1.0), Activate(silu, -2.0, 1.0));
  EXPECT_EQ(Activate(silu, kInfinity, 1.0), Activate(silu, 2.0, 1.0));
}

TEST(Activation, SituTakesTheRawGateInTheSigmoid) {
  const Activation situ = {.kind = ActivationKind::kSitu, .beta = 4, .linear_beta = 25};
  const double expected = 4 * std::tanh(3.0 / 4) / (1 + std::exp(-3.0)) * 25 * std::tanh(2.0 / 25);
  EXPECT_NEAR(Activate(situ, 3.0, 2.0), expected, 1e-14);
}

}  // namespace
}  // namespace espalier
