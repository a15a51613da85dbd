// SPDX-License-Identifier: Apache-2.0
#include <espalier/backend.h>
#include <espalier/device.h>
#include <espalier/version.h>
#include <nanobind/nanobind.h>

#include "array.h"
#include "errors.h"
#include "packages.h"

namespace espalier::python {
namespace {

nb::list Devices() {
  nb::list list;
  const Result<std::vector<DeviceInfo>> devices = WithoutGil([] { return CudaDevices(); });
  if (!devices) return list;
  for (const DeviceInfo& device : *devices) {
    nb::dict dict;
    dict["index"] = device.index;
    dict["name"] = Text(device.name);
    dict["compute_capability"] = device.compute_capability;
    dict["num_sms"] = device.num_sms;
    dict["memory_bytes"] = device.memory_bytes;
    dict["l2_bytes"] = device.l2_bytes;
    dict["clock_mhz"] = device.clock_mhz;
    dict["driver_version"] = device.driver_version;
    dict["runtime_version"] = device.runtime_version;
    list.append(dict);
  }
  return list;
}

}  // namespace
}  // namespace espalier::python

NB_MODULE(_core, module) {
  namespace python = espalier::python;
  namespace nb = nanobind;
  // Packages that a program keeps until it ends are no leak.
  nb::set_leak_warnings(false);
  module.doc() = "The bindings behind `espalier`: the library's objects, one to one.";
  module.attr("__version__") = ESPALIER_VERSION;
  python::BindArray(module);
  python::BindCheckpoint(module);
  python::BindPackages(module);
  python::BindPrepareArrays(module);
  python::BindRun(module);
  module.def(
      "devices", &python::Devices, nb::sig("def devices() -> list[dict[str, int | str]]"),
      "The GPUs that can be used, as dicts: index, name, compute_capability (90 for 9.0), num_sms,\n"
      "memory_bytes, l2_bytes, clock_mhz, driver_version, runtime_version (13020 for 13.2). [] without.");
  module.def(
      "kernels", [] { return python::Value(espalier::CpuKernelsName()); },
      "Kernels of the cpu executor in this process: \"avx512-bf16\", ..., \"portable\". UsageError where\n"
      "ESPALIER_CPU_ISA names none of this machine's.");
}
