// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "bench_report.h"
#include "svg.h"

namespace espalier::cli {
namespace {

constexpr double kLeft = 80;
constexpr double kTop = 50;
constexpr double kWidth = 620;
constexpr double kHeight = 380;
constexpr double kLegend = 190;
constexpr double kMargin = 20;
constexpr double kLine = 16;

constexpr const char* kGrid = "#ddd";

using Point = std::pair<double, double>;  // tokens, microseconds

// Whole decades around what is shown, and at least one.
struct Axis {
  double first = 0;  // powers of ten
  double last = 1;

  double At(double value) const { return (std::log10(value) - first) / (last - first); }
};

Axis AxisOf(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  Axis axis{.first = std::floor(std::log10(*least)), .last = std::ceil(std::log10(*most))};
  if (axis.last <= axis.first) axis.last = axis.first + 1;
  return axis;
}

struct Series {
  std::string name;
  Drawing::Stroke stroke;
  bool dots = false;
  std::vector<Point> points;
};

std::vector<const BenchRow*> TimedRows(const BenchReport& report) {
  std::vector<const BenchRow*> rows;
  for (const BenchRow& row : report.rows) {
    if (!row.samples_us.empty()) rows.push_back(&row);
  }
  std::sort(rows.begin(), rows.end(), [](const auto* a, const auto* b) { return a->tokens < b->tokens; });
  return rows;
}

std::vector<Series> SeriesOf(const BenchReport& report, const std::vector<const BenchRow*>& rows) {
  const auto add = [&](std::vector<Series>& all, Series series,
                       const std::function<double(const BenchRow&)>& microseconds) {
    for (const BenchRow* row : rows) {
      series.points.emplace_back(static_cast<double>(row->tokens), microseconds(*row));
    }
    all.push_back(std::move(series));
  };
  const BenchLimits& limits = report.limits;
  std::vector<Series> all;
  add(all, {.name = "packed bytes / read rate", .stroke = {.color = "#5a9", .dashes = "5 3"}, .points = {}},
      [&](const BenchRow& row) { return row.work.packed_bytes / (limits.read_gb_s * 1e3); });
  if (!limits.decode_tweights_s.empty()) {
    add(all, {.name = "weights / decode rate", .stroke = {.color = "#a7c", .dashes = "5 3"}, .points = {}},
        [&](const BenchRow& row) { return *DecodeMicroseconds(limits, row.work.format_weights); });
  }
  add(all, {.name = "products / matrix rate", .stroke = {.color = "#c95", .dashes = "5 3"}, .points = {}},
      [&](const BenchRow& row) { return row.work.flops / (limits.matrix_tflop_s * 1e6); });
  if (!rows.front()->serial_us.empty()) {
    add(all,
        {.name = "tiers one by one", .stroke = {.color = "#888", .width = 1.5}, .dots = true, .points = {}},
        [](const BenchRow& row) { return MedianOf(row.serial_us); });
  }
  add(all,
      {.name = report.executor + (report.mode.empty() ? "" : " " + report.mode),
       .stroke = {.color = "#27c", .width = 2},
       .dots = true,
       .points = {}},
      [](const BenchRow& row) { return MedianOf(row.samples_us); });
  return all;
}

class Plot {
 public:
  Plot(const Axis& x, const Axis& y) : x_(x), y_(y) {}

  Point Place(const Point& point) const {
    return {kLeft + x_.At(point.first) * kWidth, kTop + (1 - y_.At(point.second)) * kHeight};
  }

  void DrawAxes() {
    for (double power = x_.first; power <= x_.last; ++power) {
      const double x = Place({std::pow(10, power), std::pow(10, y_.first)}).first;
      DrawLine({{x, kTop}, {x, kTop + kHeight}}, {.color = kGrid});
      drawing_.Text(x, kTop + kHeight + kLine, fmt::format("{:g}", std::pow(10, power)), "middle");
    }
    for (double power = y_.first; power <= y_.last; ++power) {
      const double y = Place({std::pow(10, x_.first), std::pow(10, power)}).second;
      DrawLine({{kLeft, y}, {kLeft + kWidth, y}}, {.color = kGrid});
      drawing_.Text(kLeft - 6, y + 4, fmt::format("{:g}", std::pow(10, power)), "end");
    }
    drawing_.Text(kLeft + kWidth / 2, kTop + kHeight + 2 * kLine, "tokens", "middle");
    drawing_.Text(kMargin, kTop - 8, "us a layer");
  }

  void DrawSpread(const BenchRow& row) {
    const auto [least, most] = std::minmax_element(row.samples_us.begin(), row.samples_us.end());
    const auto tokens = static_cast<double>(row.tokens);
    DrawLine({Place({tokens, *least}), Place({tokens, *most})}, {.color = "#27c"});
  }

  void DrawSeries(const Series& series) {
    std::vector<Point> line;
    for (const Point& point : series.points) line.push_back(Place(point));
    DrawLine(line, series.stroke);
    for (const Point& point : series.points) {
      if (!series.dots) break;
      const auto [x, y] = Place(point);
      drawing_.Dot(x, y, series.stroke.color,
                   fmt::format("{}: {:.0f} tokens, {:.1f} us", series.name, point.first, point.second));
    }
    const double y = kTop + legend_lines_++ * kLine;
    const double x = kLeft + kWidth + kMargin;
    DrawLine({{x, y}, {x + 22, y}}, series.stroke);
    drawing_.Text(x + 28, y + 4, series.name);
  }

  Drawing& drawing() { return drawing_; }

 private:
  void DrawLine(const std::vector<Point>& points, const Drawing::Stroke& stroke) {
    drawing_.Line(points, stroke);
  }

  Axis x_;
  Axis y_;
  Drawing drawing_;
  int legend_lines_ = 0;
};

}  // namespace

std::string BenchSvg(const BenchReport& report) {
  const std::vector<const BenchRow*> rows = TimedRows(report);
  const double height = kTop + kHeight + 3 * kLine;
  const double width = kLeft + kWidth + kMargin + kLegend;
  const std::string title =
      fmt::format("{}{}: {}, {}", report.name, report.layer.empty() ? "" : " layer " + report.layer,
                  fmt::join(report.tiers.codebooks, ","), report.machine.device);
  if (rows.empty()) {
    Drawing drawing;
    drawing.Text(kMargin, kMargin + 10, title + ": no run passed its gate");
    return drawing.Finish(width, height);
  }
  const std::vector<Series> all = SeriesOf(report, rows);
  std::vector<double> tokens;
  std::vector<double> times;
  for (const Series& series : all) {
    for (const auto& [x, y] : series.points) {
      tokens.push_back(x);
      if (y > 0) times.push_back(y);
    }
  }
  for (const BenchRow* row : rows) times.insert(times.end(), row->samples_us.begin(), row->samples_us.end());
  Plot plot(AxisOf(tokens), AxisOf(times));
  plot.drawing().Text(kMargin, kMargin + 4, title);
  plot.DrawAxes();
  for (const BenchRow* row : rows) plot.DrawSpread(*row);
  for (const Series& series : all) plot.DrawSeries(series);
  return plot.drawing().Finish(width, height);
}

}  // namespace espalier::cli
