// SPDX-License-Identifier: Apache-2.0
#include "bench_report.h"

#include <espalier/version.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "machine.h"

namespace espalier::cli {
namespace {

// What a row comes to at its median.
struct Shares {
  double median_us = 0;
  double read = 0;
  double matrix = 0;
  std::optional<double> decode;
};

Shares SharesOf(const BenchRow& row, const BenchLimits& limits) {
  Shares shares;
  shares.median_us = MedianOf(row.samples_us);
  const double seconds = shares.median_us * 1e-6;
  shares.read = row.work.packed_bytes / seconds / (limits.read_gb_s * 1e9);
  shares.matrix = row.work.flops / seconds / (limits.matrix_tflop_s * 1e12);
  if (const auto decode_us = DecodeMicroseconds(limits, row.work.format_weights); decode_us) {
    shares.decode = *decode_us / shares.median_us;
  }
  return shares;
}

// Of the whole layer: the rate at which each weight is decoded once.
std::optional<double> LayerDecodeRate(const BenchReport& report) {
  std::vector<double> format_weights(report.tiers.formats.size());
  for (const std::vector<uint64_t>& weights : report.tiers.format_weights) {
    for (size_t i = 0; i < weights.size(); ++i) format_weights[i] += static_cast<double>(weights[i]);
  }
  const std::optional<double> us = DecodeMicroseconds(report.limits, format_weights);
  if (!us) return {};
  return std::accumulate(format_weights.begin(), format_weights.end(), 0.0) / (*us * 1e6);
}

Json NullOr(const std::optional<double>& number) { return number ? Json(*number) : Json(); }

Json MedianOrNull(const std::vector<double>& samples) {
  return samples.empty() ? Json() : Json(MedianOf(samples));
}

uint64_t Whole(double number) { return static_cast<uint64_t>(std::llround(number)); }

Json LimitsJson(const BenchReport& report) {
  const BenchLimits& limits = report.limits;
  Json rates = Json::array();
  for (size_t i = 0; i < limits.decode_tweights_s.size(); ++i) {
    const CodeFormat& format = report.tiers.formats[i];
    rates.push_back({{"bits", format.bits},
                     {"codebook", CodebookName(format.codebook)},
                     {"tweights_s", limits.decode_tweights_s[i]}});
  }
  return {{"read_gb_s", limits.read_gb_s},
          {"matrix_tflop_s", limits.matrix_tflop_s},
          {"decode_tweights_s", NullOr(LayerDecodeRate(report))},
          {"decode_rates", rates},
          {"read", limits.read_text},
          {"matrix", limits.matrix_text},
          {"decode", TextOrNull(limits.decode_text)}};
}

std::string CodebooksText(const BenchReport& report) {
  return fmt::format("{}", fmt::join(report.tiers.codebooks, ","));
}

Json ProvenanceJson(const BenchReport& report) {
  Json json = {{"command", report.command},
               {"version", ESPALIER_VERSION},
               {"commit", BuildCommit()},
               {"device", report.machine.device}};
  if (report.machine.threads) json["threads"] = *report.machine.threads;
  if (!report.machine.driver.empty()) json["driver"] = report.machine.driver;
  if (report.clock_mhz) json["clock_mhz"] = *report.clock_mhz;
  if (report.clock_mhz_after) json["clock_mhz_after"] = *report.clock_mhz_after;
  json["time"] = report.time;
  json["seed"] = report.seed;
  json["cold"] = report.cold_text;
  json["graphs"] = report.has_graphs;
  return json;
}

Json RowJson(const BenchReport& report, const BenchRow& row) {
  Json tiers = Json::object();
  for (size_t i = 0; i < report.tiers.names.size(); ++i) {
    tiers[report.tiers.names[i]] = report.tiers.experts[i];
  }
  Json json = {{"geometry", report.name},
               {"layer", TextOrNull(report.layer)},
               {"tiers", tiers},
               {"codebook", CodebooksText(report)},
               {"executor", report.executor},
               {"mode", TextOrNull(report.mode)},
               {"tokens", row.tokens},
               {"top_k", report.top_k},
               {"gate_passed", row.gate_passed},
               {"rel_l2", row.metrics.rel_l2},
               {"cosine", row.metrics.cosine},
               {"tokens_checked", row.rows_checked},
               {"serial_rel_l2", NullOr(row.serial_rel_l2)}};
  if (!row.gate_passed) json["failure"] = row.failure;
  json["median_us"] = MedianOrNull(row.samples_us);
  json["samples_us"] = row.samples_us;
  json["eager_median_us"] = MedianOrNull(row.eager_us);
  json["eager_samples_us"] = row.eager_us;
  json["serial_median_us"] = MedianOrNull(row.serial_us);
  json["serial_samples_us"] = row.serial_us;
  const bool timed = !row.samples_us.empty();
  const Shares shares = timed ? SharesOf(row, report.limits) : Shares{};
  const auto if_timed = [timed](Json value) { return timed ? std::move(value) : Json(); };
  json["experts_touched"] = if_timed(row.work.experts_touched);
  json["weights_touched"] = if_timed(Whole(row.work.weights_touched));
  json["packed_bytes"] = if_timed(Whole(row.work.packed_bytes));
  json["share_of_read"] = if_timed(shares.read);
  json["share_of_decode"] = NullOr(shares.decode);
  json["share_of_matrix"] = if_timed(shares.matrix);
  json["serial_ratio"] = row.serial_us.empty() ? Json() : Json(MedianOf(row.serial_us) / shares.median_us);
  return json;
}

std::string TiersText(const ExpertTiers& tiers) {
  std::string text;
  for (size_t i = 0; i < tiers.names.size(); ++i) {
    text += fmt::format("{}{} x K{}", text.empty() ? "" : " + ", tiers.experts[i], tiers.names[i]);
  }
  return text;
}

// " (K3 mcg 7.1, K4 mcg 7.9)"; nothing where the layer has one format.
std::string DecodeRatesText(const BenchReport& report) {
  if (report.tiers.formats.size() < 2) return "";
  std::vector<std::string> rates;
  for (size_t i = 0; i < report.tiers.formats.size(); ++i) {
    const CodeFormat& format = report.tiers.formats[i];
    rates.push_back(fmt::format("K{} {} {:.3g}", format.bits, CodebookName(format.codebook),
                                report.limits.decode_tweights_s[i]));
  }
  return fmt::format(" ({})", fmt::join(rates, ", "));
}

void PrintHeader(const BenchReport& report, Output& output) {
  const MoeGeometry& geometry = report.experts->geometry();
  output.Print("{}{}: hidden {}, intermediate {}, {} experts, top-{}, {}\n", report.name,
               report.layer.empty() ? "" : " layer " + report.layer, geometry.hidden_channels,
               report.experts->max_intermediate_channels(), geometry.experts, report.top_k,
               ActivationText(geometry.activation));
  output.Print("weights   {}, {}, {} packed\n", TiersText(report.tiers), CodebooksText(report),
               BytesText(report.experts->code_bytes()));
  output.Print("executor  {}{}{}, x {}\n", report.executor, report.mode.empty() ? "" : " ", report.mode,
               DtypeName(report.input));
  std::string machine = report.machine.device;
  if (report.machine.threads) machine += fmt::format(", {} threads", *report.machine.threads);
  if (!report.machine.driver.empty()) machine += ", driver " + report.machine.driver;
  if (report.clock_mhz) machine += fmt::format(", {:.0f} MHz", *report.clock_mhz);
  if (report.clock_mhz_after) machine += fmt::format(" before and {:.0f} after", *report.clock_mhz_after);
  output.Print("machine   {}\n", machine);
  output.Print("build     {} ({}), {}\n", ESPALIER_VERSION, BuildCommit(), report.time);
  output.Print("limits    read {:.1f} GB/s: {}\n", report.limits.read_gb_s, report.limits.read_text);
  output.Print("          matrix {:.3g} TFLOP/s: {}\n", report.limits.matrix_tflop_s,
               report.limits.matrix_text);
  if (const std::optional<double> decode = LayerDecodeRate(report); decode) {
    output.Print("          decode {:.3g} Tweights/s{}: {}\n", *decode, DecodeRatesText(report),
                 report.limits.decode_text);
  }
  output.Print("cold      {}; routes are new in every sample\n", report.cold_text);
  output.Print("gate      rel_l2 <= {:.3g}{}{}\n\n", report.gate.max_rel_l2,
               report.gate.min_cosine > 0 ? fmt::format(", cosine >= {}", report.gate.min_cosine) : "",
               report.tiers.names.size() > 1 ? fmt::format(", against serial tiers <= {}", kSerialGate) : "");
}

std::string PercentText(double share) { return fmt::format("{:.1f} %", 100 * share); }

void PrintRow(const BenchReport& report, const BenchRow& row, Output& output) {
  if (!row.gate_passed) {
    output.Print("{:>7} {:>10.3g}  gate failed: {}\n", row.tokens, row.metrics.rel_l2, row.failure);
    return;
  }
  const Shares shares = SharesOf(row, report.limits);
  const auto [least, most] = std::minmax_element(row.samples_us.begin(), row.samples_us.end());
  output.Print(
      "{:>7} {:>10.3g} {:>11.1f} {:>11.1f} {:>11.1f} {:>4} {:>8.1f} {:>10.4g} {:>11} {:>8} {:>8} {:>8}",
      row.tokens, row.metrics.rel_l2, shares.median_us, *least, *most, row.samples_us.size(),
      row.work.experts_touched, row.work.weights_touched * 1e-6, BytesText(Whole(row.work.packed_bytes)),
      PercentText(shares.read), shares.decode ? PercentText(*shares.decode) : "-",
      PercentText(shares.matrix));
  if (report.has_graphs) output.Print(" {:>11.1f}", MedianOf(row.eager_us));
  if (row.serial_us.empty()) {
    output.Print(" {:>11} {:>6}\n", "-", "-");
  } else {
    const double serial_us = MedianOf(row.serial_us);
    output.Print(" {:>11.1f} {:>6.2f}\n", serial_us, serial_us / shares.median_us);
  }
}

}  // namespace

bool BenchReport::ok() const {
  return std::all_of(rows.begin(), rows.end(), [](const BenchRow& row) { return row.gate_passed; });
}

double MedianOf(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t half = samples.size() / 2;
  return samples.size() % 2 != 0 ? samples[half] : (samples[half - 1] + samples[half]) / 2;
}

std::optional<double> DecodeMicroseconds(const BenchLimits& limits, std::span<const double> format_weights) {
  if (limits.decode_tweights_s.empty()) return {};
  double us = 0;
  for (size_t i = 0; i < format_weights.size(); ++i)
    us += format_weights[i] / (limits.decode_tweights_s[i] * 1e6);
  return us;
}

Json BenchDocument(const BenchReport& report) {
  Json results = Json::array();
  for (const BenchRow& row : report.rows) results.push_back(RowJson(report, row));
  const MoeGeometry& geometry = report.experts->geometry();
  return {
      {"schema", "espalier.bench/1"},
      {"provenance", ProvenanceJson(report)},
      {"limits", LimitsJson(report)},
      {"gate",
       {{"max_rel_l2", report.gate.max_rel_l2},
        {"min_cosine", report.gate.min_cosine},
        {"serial_max_rel_l2", kSerialGate}}},
      {"package",
       {{"hidden_channels", geometry.hidden_channels},
        {"intermediate_channels", report.experts->max_intermediate_channels()},
        {"experts", geometry.experts},
        {"activation", ActivationText(geometry.activation)},
        {"weights", std::accumulate(report.tiers.weights.begin(), report.tiers.weights.end(), uint64_t{0})},
        {"code_bytes", report.experts->code_bytes()}}},
      {"results", results},
      {"ok", report.ok()}};
}

void PrintBench(const BenchReport& report, Output& output) {
  PrintHeader(report, output);
  output.Print(
      "{:>7} {:>10} {:>11} {:>11} {:>11} {:>4} {:>8} {:>10} {:>11} {:>8} {:>8} {:>8}{} {:>11} {:>6}\n",
      "tokens", "rel_l2", "median us", "min us", "max us", "of", "experts", "Mweights", "packed", "read",
      "decode", "matrix", report.has_graphs ? "    eager us" : "", "serial us", "ratio");
  for (const BenchRow& row : report.rows) PrintRow(report, row, output);
}

}  // namespace espalier::cli
