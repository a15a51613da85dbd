// SPDX-License-Identifier: Apache-2.0
//
// Random numbers for made-up inputs: the same bits on every machine.
#ifndef ESPALIER_CLI_RANDOM_H_
#define ESPALIER_CLI_RANDOM_H_

#include <cmath>
#include <cstdint>

namespace espalier::cli {

// SplitMix64: 64 well mixed bits per step from any seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // [0, 1), a multiple of 2^-53.
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  // [0, limit); the bias of 2^-64 * limit does not matter here.
  uint32_t Below(uint32_t limit) { return static_cast<uint32_t>(Uniform() * limit); }

  // N(0, 1) by Marsaglia's polar form of Box-Muller, whose only transcendental is a logarithm.
  double Normal() {
    if (spare_ready_) {
      spare_ready_ = false;
      return spare_;
    }
    double u = 0;
    double v = 0;
    double s = 0;
    do {
      u = 2 * Uniform() - 1;
      v = 2 * Uniform() - 1;
      s = u * u + v * v;
    } while (s >= 1 || s == 0);
    const double factor = std::sqrt(-2 * NaturalLog(s) / s);
    spare_ = v * factor;
    spare_ready_ = true;
    return u * factor;
  }

 private:
  // ln x by ln((1+t)/(1-t)) = 2 (t + t^3/3 + ...). Only operations that IEEE 754 rounds alike
  // everywhere: the log() of two C libraries, or of one on two CPUs, may differ in the last bit.
  static double NaturalLog(double x) {
    constexpr double kLn2 = 0.693147180559945309417;
    int exponent = 0;
    const double mantissa = std::frexp(x, &exponent);  // [0.5, 1)
    const double t = (mantissa - 1) / (mantissa + 1);  // (-1/3, 0]
    double power = t;
    double sum = 0;
    // (1/3)^35 / 35 is below 2^-60.
    for (int n = 1; n <= 35; n += 2) {
      sum += power / n;
      power *= t * t;
    }
    return 2 * sum + exponent * kLn2;
  }

  uint64_t state_;
  double spare_ = 0;
  bool spare_ready_ = false;
};

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_RANDOM_H_
