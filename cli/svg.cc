// SPDX-License-Identifier: Apache-2.0
#include "svg.h"

#include <fmt/format.h>
#include <simdjson.h>

#include "output.h"

namespace espalier::cli {
namespace {

// What XML takes: UTF-8 without control characters and U+FFFE, U+FFFF. Everything else becomes '?'.
std::string Escaped(std::string_view text) {
  const bool valid = simdjson::validate_utf8(text.data(), text.size()) &&
                     text.find("\xEF\xBF\xBE") == text.npos && text.find("\xEF\xBF\xBF") == text.npos;
  std::string escaped;
  for (char c : Printable(text)) {
    if (!valid && static_cast<unsigned char>(c) >= 0x80) c = '?';
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

}  // namespace

void Drawing::Text(double x, double y, std::string_view text, std::string_view anchor,
                   std::string_view color) {
  const std::string fill = color.empty() ? "" : fmt::format(" fill=\"{}\"", color);
  body_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y, anchor, fill,
                       Escaped(text));
}

void Drawing::Box(double x, double y, double width, double height, std::string_view color,
                  std::string_view title) {
  body_ += fmt::format(
      "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.0f}\" "
      "fill=\"{}\"><title>{}</title></rect>\n",
      x, y, width, height, color, Escaped(title));
}

void Drawing::Line(std::span<const std::pair<double, double>> points, const Stroke& stroke) {
  std::string list;
  for (const auto& [x, y] : points) list += fmt::format("{}{:.1f},{:.1f}", list.empty() ? "" : " ", x, y);
  const std::string dashes =
      stroke.dashes.empty() ? "" : fmt::format(" stroke-dasharray=\"{}\"", stroke.dashes);
  body_ += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{:.1f}\"{}/>\n",
                       list, stroke.color, stroke.width, dashes);
}

void Drawing::Dot(double x, double y, std::string_view color, std::string_view title) {
  body_ +=
      fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>{}</title></circle>\n", x,
                  y, color, Escaped(title));
}

std::string Drawing::Finish(double width, double height) const {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 "
      "{0:.0f} "
      "{1:.0f}\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#555\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{2}</svg>\n",
      width, height, body_);
}

}  // namespace espalier::cli
