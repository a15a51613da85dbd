// SPDX-License-Identifier: Apache-2.0
//
// What this binary was built from, and the processor under it.
#ifndef ESPALIER_CLI_MACHINE_H_
#define ESPALIER_CLI_MACHINE_H_

#include <cstdint>
#include <optional>
#include <string>

namespace espalier::cli {

std::string BuildCommit();   // as git describes what was configured; "unknown" outside of git
std::string Architecture();  // "x86_64"

// The kernel's name for the CPU, or the architecture's where it gives none.
std::string CpuModel();

// Of the kernel module, "580.82.07"; empty where there is none.
std::string NvidiaDriverVersion();

// Of the fastest core at this moment; empty where the kernel does not tell.
std::optional<double> CpuClockMhz();

// Of all last-level caches together; empty where the kernel does not tell.
std::optional<uint64_t> CpuCacheBytes();

}  // namespace espalier::cli

#endif  // ESPALIER_CLI_MACHINE_H_
