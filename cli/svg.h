// SPDX-License-Identifier: Apache-2.0
//
// Standalone SVG pictures, as far as the commands draw any.
#ifndef ESPALIER_CLI_SVG_H_
#define ESPALIER_CLI_SVG_H_

#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace espalier::cli {

// Coordinates are pixels from the upper left corner. Texts may come from files: what XML cannot take is
// replaced.
class Drawing {
 public:
  void Text(double x, double y, std::string_view text, std::string_view anchor = "start",
            std::string_view color = "");
  // `title` is shown by viewers that point at it.
  void Box(double x, double y, double width, double height, std::string_view color, std::string_view title);
  struct Stroke {
    std::string color;
    double width = 1;
    std::string dashes = {};  // "4 3"; empty = none
  };
  void Line(std::span<const std::pair<double, double>> points, const Stroke& stroke);
  void Dot(double x, double y, std::string_view color, std::string_view title);

  std::string Finish(double width, double height) const;

 private:
  std::string body_;
};

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_SVG_H_
