#include "preflight/machine_figures.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gnu/libc-version.h>
#include <pthread.h>
#include <sched.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>

#include "common/clock.h"
#include "common/json_messages.h"
#include "common/processes.h"
#include "common/text_table.h"

namespace syncbn::launch {
namespace {

// A figure is an outlier if it is worse by this factor than the median of all nodes or, for a core,
// of its node's cores.
constexpr double kOutlier = 1.5;
// The same for a GPU and the median of its model, whose rates vary less.
constexpr double kGpuOutlier = 1.25;
// Upper bound on measuring the GPUs of a node. The driver may need seconds to start each.
constexpr std::chrono::seconds kGpuPatience{30};
// Round trips below this are not compared, in seconds.
constexpr double kShortTrip = 500e-6;
// Clocks that differ by less are not reported, in seconds.
constexpr double kClockTolerance = 1;
constexpr std::array kVersions{"syncbn-launch", "Linux", "glibc", "NVIDIA driver"};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Floating point operations per second of the core on which this thread runs: independent
// multiplications and additions, without memory.
double rate_of_core() {
  constexpr int kRounds = 10'000;
  constexpr double kTime = 0.03;
  std::array<double, 16> sums{};
  double operations = 0;
  const auto begin = Clock::now();
  while (base::seconds_since(begin) < kTime) {
    for (int round = 0; round < kRounds; ++round) {
      for (double& sum : sums) sum = sum * 0.999 + 1.5;
    }
    operations += 2.0 * kRounds * static_cast<double>(sums.size());
  }
  const double time = base::seconds_since(begin);
  volatile double used = sums[0];
  static_cast<void>(used);
  return operations / time;
}

// All cores compute at once, as in a job; the better of two rates counts, because a core may be
// interrupted.
void measure_cores(MachineFigures& figures) {
  const base::Cpus allowed = base::allowed_cpus();
  const std::vector<int> cpus(allowed.begin(), allowed.end());
  std::vector<double> rates(cpus.size());
  for (int round = 0; round < 2; ++round) {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < cpus.size(); ++i) {
      threads.emplace_back([&, i] {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(static_cast<size_t>(cpus[i]), &one);
        ::pthread_setaffinity_np(::pthread_self(), sizeof(one), &one);
        rates[i] = std::max(rates[i], rate_of_core());
      });
    }
  }
  const auto slowest = std::ranges::min_element(rates);
  figures.cores = base::usable_cpus();
  figures.core_rate = median(rates);
  if (slowest == rates.end()) return;
  figures.slowest_rate = *slowest;
  figures.slowest_core = cpus[static_cast<size_t>(slowest - rates.begin())];
}

// Writes up to 64 MiB to a file without a name, for a second at most.
void measure_disk(const std::string& folder, MachineFigures& figures) {
  constexpr int kChunks = 64;
  const std::vector<char> chunk(size_t{1} << 20, 'x');
  const auto begin = Clock::now();
  std::string path = folder + "/.syncbn-preflight-XXXXXX";
  const base::UniqueFd file(::mkostemp(path.data(), O_CLOEXEC));
  if (file) ::unlink(path.c_str());
  double written = 0;
  bool is_written = static_cast<bool>(file);
  for (int i = 0; i < kChunks && is_written && base::seconds_since(begin) < 1; ++i) {
    const ssize_t size = ::write(file.get(), chunk.data(), chunk.size());
    is_written = size == static_cast<ssize_t>(chunk.size());
    if (is_written) written += static_cast<double>(size);
    if (size >= 0 && !is_written) errno = ENOSPC;
  }
  if (!is_written || ::fdatasync(file.get()) != 0) {
    figures.disk_error = fmt::format("{}: {}", folder, std::strerror(errno));
    return;
  }
  figures.disk_rate = written / base::seconds_since(begin);
}

uint64_t hard_limit(__rlimit_resource_t resource) {
  rlimit limit{};
  constexpr uint64_t kUnlimited = uint64_t{1} << 62;  // exact as a double
  return ::getrlimit(resource, &limit) == 0 ? std::min<uint64_t>(limit.rlim_max, kUnlimited) : 0;
}

std::string name_of(const std::vector<MachineFigures>& nodes, size_t index) {
  return fmt::format("node {} ({})", index, nodes[index].host);
}

// Another node may send any number.
uint64_t whole(double number) {
  constexpr double kMax = 1e19;
  return number > 0 ? static_cast<uint64_t>(std::min(number, kMax)) : 0;
}

std::string rate_text(double bytes_per_second) {
  return base::format_bytes(whole(bytes_per_second)) + "/s";
}

std::string giga(double per_second) {
  return fmt::format("{:.1f}", per_second / 1e9);
}

std::string name_of(const std::vector<MachineFigures>& nodes, size_t index, size_t gpu) {
  const std::string& address = nodes[index].gpu_figures[gpu].address;
  return fmt::format("{}, GPU {}{}", name_of(nodes, index), gpu,
                     address.empty() ? "" : fmt::format(" ({})", address));
}

// Larger values are better.
struct Figure {
  std::string whose;
  double value;
};

// Reports each figure that is below the median by this factor.
// @param all names the set of figures, such as "all nodes"
void compare(const std::vector<Figure>& figures, double factor, const std::string& what,
             const std::string& all, const std::function<std::string(double)>& text,
             PreflightFindings& findings) {
  std::vector<double> values;
  values.reserve(figures.size());
  for (const Figure& figure : figures) values.push_back(figure.value);
  const double middle = median(std::move(values));
  for (const Figure& figure : figures) {
    if (figure.value * factor >= middle) continue;
    findings.outliers.push_back(fmt::format("{}: {}, and the median of {} is {}", figure.whose,
                                            fmt::format(fmt::runtime(what), text(figure.value)),
                                            all, text(middle)));
  }
}

// Compares a figure of the nodes: a rate (0: not measured) or a limit.
template <class Number>
void compare_nodes(const std::vector<MachineFigures>& nodes, Number MachineFigures::*figure,
                   const std::string& what, const std::function<std::string(double)>& text,
                   PreflightFindings& findings) {
  constexpr bool is_rate = std::is_floating_point_v<Number>;
  std::vector<Figure> figures;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto value = static_cast<double>(nodes[i].*figure);
    if (!is_rate || value > 0) figures.push_back({name_of(nodes, i), value});
  }
  compare(figures, is_rate ? kOutlier : 2, what, "all nodes", text, findings);
}

void judge_gpus(const std::vector<MachineFigures>& nodes, PreflightFindings& findings) {
  std::map<std::string, std::vector<Figure>> memory;  // by model
  for (size_t i = 0; i < nodes.size(); ++i) {
    const std::vector<GpuFigures>& gpus = nodes[i].gpu_figures;
    for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
      const std::string name = name_of(nodes, i, gpu);
      const GpuFigures& own = gpus[gpu];
      if (!own.error.empty()) {
        findings.failures.push_back(fmt::format("{} cannot be used: {}", name, own.error));
      } else if (own.memory_rate > 0) {
        memory[own.model].push_back({name, own.memory_rate});
      }
    }
    const bool has_failed = !gpus.empty() && gpus[0].model.empty();
    if (!has_failed && std::cmp_less(gpus.size(), nodes[i].gpus)) {
      findings.outliers.push_back(
          fmt::format("{}: CUDA finds {} of its {} (driver, CUDA_VISIBLE_DEVICES)",
                      name_of(nodes, i), gpus.size(), base::counted(nodes[i].gpus, "GPU")));
    }
  }
  for (const auto& [model, figures] : memory) {
    compare(figures, kGpuOutlier, "its memory moves {}", fmt::format("its model ({})", model),
            rate_text, findings);
  }
}

// "2 GPUs (NVIDIA H100 80GB HBM3)"
std::string describe_gpus(const MachineFigures& node) {
  std::set<std::string> models;
  for (const GpuFigures& gpu : node.gpu_figures) {
    if (!gpu.model.empty()) models.insert(gpu.model);
  }
  const std::string count = base::counted(node.gpus, "GPU");
  return models.empty() ? count : fmt::format("{} ({})", count, fmt::join(models, ", "));
}

// Reports the nodes that differ from most others; if there is no majority, from the first of the
// largest groups.
void compare_with_most(const std::vector<MachineFigures>& nodes,
                       const std::function<std::string(const MachineFigures&)>& text,
                       PreflightFindings& findings) {
  std::map<std::string, int> counts;
  for (const MachineFigures& node : nodes) ++counts[text(node)];
  const auto& usual = *std::ranges::max_element(
      nodes, {}, [&](const MachineFigures& node) { return counts[text(node)]; });
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (text(nodes[i]) == text(usual)) continue;
    findings.outliers.push_back(
        fmt::format("{}: {}, and {} has {}", name_of(nodes, i), text(nodes[i]),
                    name_of(nodes, static_cast<size_t>(&usual - nodes.data())), text(usual)));
  }
}

void judge_links(const std::vector<MachineFigures>& nodes, PreflightFindings& findings) {
  std::vector<double> trips;
  trips.reserve(nodes.size());
  for (const MachineFigures& node : nodes) trips.push_back(node.round_trip);
  const double usual = std::max(kShortTrip, median(trips));
  double ahead = 0;  // of node 0's clock, in seconds
  for (size_t i = 0; i < nodes.size(); ++i) {
    const std::string next = name_of(nodes, (i + 1) % nodes.size());
    if (!nodes[i].link_error.empty()) {
      findings.failures.push_back(
          fmt::format("{} cannot reach {}: {}", name_of(nodes, i), next, nodes[i].link_error));
    }
    if (nodes[i].round_trip > kOutlier * usual) {
      findings.outliers.push_back(fmt::format(
          "{}: a round trip to {} takes {}, and the median is {}", name_of(nodes, i), next,
          base::format_seconds(nodes[i].round_trip), base::format_seconds(median(trips))));
    }
    if (std::abs(ahead) > kClockTolerance) {
      findings.outliers.push_back(
          fmt::format("{}: its clock is {} {} of node 0's (harmless, but times in logs differ)",
                      name_of(nodes, i), base::format_seconds(std::abs(ahead)),
                      ahead > 0 ? "ahead" : "behind"));
    }
    ahead += nodes[i].clock_ahead;
  }
}

}  // namespace

MachineFigures measure_machine(const std::string& folder) {
  MachineFigures figures{.host = base::hostname()};
  utsname kernel{};
  ::uname(&kernel);
  figures.versions = {{kVersions[0], SYNCBN_VERSION},
                      {kVersions[1], kernel.release},
                      {kVersions[2], ::gnu_get_libc_version()},
                      {kVersions[3], base::nvidia_driver_version()}};
  measure_cores(figures);
  const std::string kib = value_in("/proc/meminfo", "MemAvailable:");
  figures.memory = std::strtoull(kib.c_str(), nullptr, 10) << 10;
  const std::optional<int> listed = base::count_gpus_at_hand(false);
  figures.gpu_figures = measure_gpus(listed, kGpuPatience);
  figures.gpus = listed.value_or(static_cast<int>(figures.gpu_figures.size()));
  measure_disk(folder, figures);
  figures.open_files = hard_limit(RLIMIT_NOFILE);
  figures.processes = hard_limit(RLIMIT_NPROC);
  struct statvfs shm {};
  if (::statvfs("/dev/shm", &shm) == 0) figures.shared_memory = shm.f_bavail * shm.f_frsize;
  return figures;
}

PreflightFindings judge(const std::vector<MachineFigures>& nodes) {
  PreflightFindings findings;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const MachineFigures& node = nodes[i];
    if (!node.disk_error.empty()) {
      findings.failures.push_back(
          fmt::format("{} cannot write to {}", name_of(nodes, i), node.disk_error));
    }
    if (node.slowest_rate * kOutlier < node.core_rate) {
      findings.outliers.push_back(fmt::format(
          "{}: core {} computes at {} GFLOP/s, and the median core at {} GFLOP/s",
          name_of(nodes, i), node.slowest_core, giga(node.slowest_rate), giga(node.core_rate)));
    }
  }
  compare_with_most(nodes, describe_gpus, findings);
  for (const char* const name : kVersions) {
    compare_with_most(
        nodes,
        [name](const MachineFigures& node) {
          const auto own = node.versions.find(name);
          const bool has = own != node.versions.end() && !own->second.empty();
          return has ? fmt::format("{} {}", name, own->second) : fmt::format("no {}", name);
        },
        findings);
  }
  const auto giga_text = [](double rate) { return giga(rate) + " GFLOP/s"; };
  compare_nodes(nodes, &MachineFigures::core_rate, "its median core computes at {}", giga_text,
                findings);
  judge_gpus(nodes, findings);
  compare_nodes(nodes, &MachineFigures::disk_rate, "its disk takes {}", rate_text, findings);
  compare_nodes(nodes, &MachineFigures::link_rate, "to the next node it sends {}", rate_text,
                findings);
  if (nodes.size() > 1) judge_links(nodes, findings);
  const auto count = [](double number) { return std::to_string(whole(number)); };
  const auto bytes = [](double number) { return base::format_bytes(whole(number)); };
  compare_nodes(nodes, &MachineFigures::open_files, "{} open files (ulimit -Hn)", count, findings);
  compare_nodes(nodes, &MachineFigures::processes, "{} processes (ulimit -Hu)", count, findings);
  compare_nodes(nodes, &MachineFigures::memory, "{} of available memory", bytes, findings);
  compare_nodes(nodes, &MachineFigures::shared_memory, "{} free in /dev/shm", bytes, findings);
  return findings;
}

std::string table_of(const std::vector<MachineFigures>& nodes) {
  std::vector<std::vector<std::string>> machines{{"node", "host", "cores", "GFLOP/s", "memory",
                                                  "GPUs", "disk", "round trip", "to next",
                                                  "/dev/shm"}};
  std::vector<std::vector<std::string>> gpus{
      {"node", "host", "GPU", "model", "address", "memory", "memory rate"}};
  for (size_t i = 0; i < nodes.size(); ++i) {
    const MachineFigures& node = nodes[i];
    const bool has_link = nodes.size() > 1 && node.link_error.empty();
    machines.push_back(
        {std::to_string(i), node.host, std::to_string(node.cores), giga(node.core_rate),
         base::format_bytes(node.memory), std::to_string(node.gpus),
         node.disk_error.empty() ? rate_text(node.disk_rate) : "-",
         has_link ? base::format_seconds(node.round_trip) : "-",
         has_link ? rate_text(node.link_rate) : "-", base::format_bytes(node.shared_memory)});
    for (size_t gpu = 0; gpu < node.gpu_figures.size(); ++gpu) {
      const GpuFigures& own = node.gpu_figures[gpu];
      gpus.push_back({std::to_string(i), node.host, std::to_string(gpu), own.model, own.address,
                      base::format_bytes(own.memory),
                      own.memory_rate > 0 ? rate_text(own.memory_rate) : "-"});
    }
  }
  const std::string text = text_table(">4 <4 >5 >7 >9 >4 >11 >10 >11 >9", machines);
  return gpus.size() == 1 ? text : text + text_table(">4 <4 >3 <5 <7 >9 >11", gpus);
}

}  // namespace syncbn::launch
