#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/temp_folder.h"

namespace syncbn::test {

/// A folder that looks like another machine's /sys.
class MadeUpSys {
 public:
  const std::filesystem::path& path() const { return folder_.path(); }

  void write(const std::filesystem::path& name, const std::string& text) const {
    std::filesystem::create_directories((path() / name).parent_path());
    std::ofstream(path() / name) << text << "\n";
  }
  void add_node(int id, const std::string& cpulist) const {
    write(fmt::format("devices/system/node/node{}/cpulist", id), cpulist);
  }
  void add_cpu(int cpu, int socket, const std::string& siblings) const {
    write(fmt::format("{}/topology/physical_package_id", folder_of(cpu)), std::to_string(socket));
    write(fmt::format("{}/topology/thread_siblings_list", folder_of(cpu)), siblings);
  }
  void add_pci_device(const std::string& address, int node) const {
    write(fmt::format("bus/pci/devices/{}/numa_node", address), std::to_string(node));
  }

 private:
  static std::string folder_of(int cpu) { return fmt::format("devices/system/cpu/cpu{}", cpu); }

  TempFolder folder_;
};

}  // namespace syncbn::test
