// SPDX-License-Identifier: Apache-2.0
#include "plan_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "output.h"
#include "svg.h"

namespace espalier::cli {
namespace {

constexpr double kLeft = 90;
constexpr double kWidth = 720;
constexpr double kBand = 14;
constexpr double kGap = 2;
constexpr double kMinMarkedWidth = 22;
constexpr double kLine = 18;
constexpr double kMargin = 20;
constexpr size_t kMaxBars = 256;  // ranks drawn one by one

// The golden angle keeps neighbours apart at any number of ranks. As numbers: not every viewer knows hsl().
std::string ColorOf(int rank) {
  constexpr double kSaturation = 0.55, kLightness = 0.62;
  const double hue = std::fmod(137.508 * rank, 360) / 30;
  const auto channel = [&](double n) {
    const double k = std::fmod(n + hue, 12);
    const double reach = kSaturation * std::min(kLightness, 1 - kLightness);
    return static_cast<int>(255 * (kLightness - reach * std::max(-1.0, std::min({k - 3, 9 - k, 1.0}))));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", channel(0), channel(8), channel(4));
}

void DrawBand(Drawing& drawing, double x, double y, double width, const std::string& color,
              std::string_view title) {
  drawing.Box(x, y, std::max(width - 0.5, 0.2), kBand, color, title);
}

// The number of an owner, where there is room for it.
void DrawOwner(Drawing& drawing, double x, double y, double width, size_t owner) {
  if (width < kMinMarkedWidth) return;
  drawing.Text(x + width / 2, y + kBand - 3, std::to_string(owner), "middle", "#222");
}

double DrawLayers(const Checkpoint& checkpoint, const ExtentPlan& plan, Drawing& drawing, double y) {
  drawing.Text(kLeft, y, "intermediate channels, by layer and tensor-parallel rank");
  y += 8;
  for (const LayerExtents& layer : plan.layers()) {
    const MoeLayer& info = checkpoint.layers()[layer.layer];
    drawing.Text(kLeft - 6, y + kBand - 3, "layer " + info.label, "end");
    const double scale = kWidth / static_cast<double>(std::max<uint64_t>(info.intermediate_channels, 1));
    for (size_t rank = 0; rank < layer.ranks.size(); ++rank) {
      const RankExtent& extent = layer.ranks[rank];
      if (extent.channels == 0) continue;
      DrawBand(drawing, kLeft + static_cast<double>(extent.first_channel) * scale, y,
               static_cast<double>(extent.channels) * scale, ColorOf(static_cast<int>(rank)),
               fmt::format("layer {}, tp rank {}: channels {} to {} ({}), {}", info.label, rank,
                           extent.first_channel, extent.first_channel + extent.channels - 1, extent.channels,
                           BytesText(extent.weight_bytes)));
      DrawOwner(drawing, kLeft + static_cast<double>(extent.first_channel) * scale, y,
                static_cast<double>(extent.channels) * scale, rank);
    }
    y += kBand + kGap;
  }
  return y;
}

double DrawExperts(const Checkpoint& checkpoint, const ExtentPlan& plan, Drawing& drawing, double y) {
  if (plan.ep() == 1 || plan.layers().empty()) return y;
  const double scale = kWidth / std::max<double>(checkpoint.layers()[0].experts, 1);
  drawing.Text(kLeft, y + kLine, "experts, by expert-parallel rank");
  y += kLine + 8;
  for (int ep = 0; ep < plan.ep(); ++ep) {
    const ExpertRange range = plan.Experts(0, ep);
    if (range.experts == 0) continue;
    DrawBand(drawing, kLeft + range.first_expert * scale, y, range.experts * scale, ColorOf(ep * plan.tp()),
             fmt::format("ep rank {}: experts {} to {}", ep, range.first_expert,
                         range.first_expert + range.experts - 1));
    DrawOwner(drawing, kLeft + range.first_expert * scale, y, range.experts * scale, static_cast<size_t>(ep));
  }
  return y + kBand + kGap;
}

double DrawBytes(const ExtentPlan& plan, std::span<const RankMemory> memory, Drawing& drawing, double y) {
  uint64_t most = 1;
  for (const RankMemory& rank : memory) most = std::max(most, rank.slab_bytes);
  drawing.Text(kLeft, y + kLine, "weights by rank");
  y += kLine + 8;
  const size_t drawn = std::min(memory.size(), kMaxBars);
  for (size_t rank = 0; rank < drawn; ++rank) {
    const uint64_t bytes = memory[rank].slab_bytes;
    const double width = kWidth * static_cast<double>(bytes) / static_cast<double>(most);
    drawing.Text(kLeft - 6, y + kBand - 3, fmt::format("rank {}", rank), "end");
    DrawBand(drawing, kLeft, y, width, ColorOf(static_cast<int>(rank) % plan.tp()),
             fmt::format("rank {}: {}", rank, BytesText(bytes)));
    drawing.Text(kLeft + width + 6, y + kBand - 3, BytesText(bytes));
    y += kBand + kGap;
  }
  if (drawn < memory.size()) {
    drawing.Text(kLeft, y + kLine - 4, fmt::format("and {} more ranks", memory.size() - drawn));
    y += kLine;
  }
  return y;
}

}  // namespace

std::string PlanSvg(const std::string& name, const Checkpoint& checkpoint, const ExtentPlan& plan,
                    std::span<const RankMemory> memory) {
  Drawing drawing;
  double y = kMargin + 10;
  drawing.Text(kMargin, y, fmt::format("{}: tp {}, ep {}", name, plan.tp(), plan.ep()));
  y = DrawLayers(checkpoint, plan, drawing, y + kLine);
  y = DrawExperts(checkpoint, plan, drawing, y);
  y = DrawBytes(plan, memory, drawing, y);
  return drawing.Finish(kLeft + kWidth + 110, y + kMargin);
}

}  // namespace espalier::cli
