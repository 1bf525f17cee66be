#include <dlfcn.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string_view>

namespace syncbn::base {
namespace {

namespace fs = std::filesystem;

// The entries of CUDA_VISIBLE_DEVICES; std::nullopt if it is not set. Not env(), because the empty
// string hides all GPUs. CUDA ignores an invalid entry and all that follow.
std::optional<std::vector<std::string>> visible_devices() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return std::nullopt;
  std::vector<std::string> devices = words_of(visible);
  const auto invalid = [](const std::string& entry) { return entry.empty() || entry[0] == '-'; };
  devices.erase(std::ranges::find_if(devices, invalid), devices.end());
  return devices;
}

constexpr const char* kDriversFolder = "driver/nvidia/gpus";

// From the line "GPU UUID: 	 GPU-…".
std::string uuid_in(const fs::path& information) {
  std::ifstream file(information);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("GPU UUID:")) return line.substr(line.find_last_of(" \t") + 1);
  }
  return "";
}

// The GPU that an entry of CUDA_VISIBLE_DEVICES names: by number, by the start of a UUID, or as
// "MIG-<UUID>/…".
const Gpu* find_gpu(const std::string& entry, const std::vector<Gpu>& machine) {
  if (const auto number = parse_number<size_t>(entry)) {
    return *number < machine.size() ? &machine[*number] : nullptr;
  }
  constexpr std::string_view kMig = "MIG-";
  std::string_view uuid = entry;
  if (uuid.starts_with(kMig)) uuid.remove_prefix(kMig.size());
  uuid = uuid.substr(0, uuid.find('/'));
  const auto found = std::ranges::find_if(
      machine, [&](const Gpu& gpu) { return !uuid.empty() && gpu.uuid.starts_with(uuid); });
  return found == machine.end() ? nullptr : &*found;
}

// nvmlPciInfo_t of nvml.h (CUDA toolkit).
struct PciInfo {
  std::array<char, 16> legacy_address;
  std::array<unsigned, 5> numbers;
  std::array<char, 32> address;  ///< "00000000:DC:00.0"
};

// Converts NVML's address to /sys's form: four digits for the domain, lower case.
std::string sys_address(std::string address) {
  constexpr size_t kDomainDigits = 4;
  const size_t colon = address.find(':');
  if (colon != std::string::npos && colon > kDomainDigits) address.erase(0, colon - kDomainDigits);
  for (char& c : address) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return address;
}

// NVIDIA's management library, a part of the driver.
class Nvml {
 public:
  Nvml()
      : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)),
        is_started_(library_ && call("nvmlInit_v2")) {}
  ~Nvml() {
    if (is_started_) call("nvmlShutdown");
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // False if the library is not installed, or the driver does not work.
  bool is_started() const { return is_started_; }

  template <class... Args>
  bool call(const char* name, Args... args) const {
    auto* const function = reinterpret_cast<int (*)(Args...)>(::dlsym(library_.get(), name));
    return function != nullptr && function(args...) == 0;  // NVML_SUCCESS
  }

 private:
  struct Close {
    void operator()(void* library) const { ::dlclose(library); }
  };
  const std::unique_ptr<void, Close> library_;
  const bool is_started_;
};

// The GPUs that NVML knows.
std::vector<Gpu> gpus_of_nvml() {
  const Nvml nvml;
  if (!nvml.is_started()) return {};
  unsigned count = 0;
  nvml.call("nvmlDeviceGetCount_v2", &count);
  std::vector<Gpu> gpus(count);
  for (unsigned i = 0; i < count; ++i) {
    void* device = nullptr;
    std::array<char, 96> uuid{};
    PciInfo info{};
    if (!nvml.call("nvmlDeviceGetHandleByIndex_v2", i, &device)) continue;
    const auto size = static_cast<unsigned>(uuid.size());
    if (nvml.call("nvmlDeviceGetUUID", device, uuid.data(), size)) gpus[i].uuid = uuid.data();
    if (nvml.call("nvmlDeviceGetPciInfo_v3", device, &info)) {
      gpus[i].address = sys_address(info.address.data());
    }
  }
  return gpus;
}

}  // namespace

int count_gpus(bool virtual_local_rank) {
  if (const auto count = count_gpus_at_hand(virtual_local_rank)) return *count;
  return static_cast<int>(gpus_of_nvml().size());
}

std::optional<int> count_gpus_at_hand(bool virtual_local_rank) {
  if (const auto visible = visible_devices()) {
    const bool only_first =
        !virtual_local_rank && !visible->empty() && visible->front().starts_with("MIG-");
    return only_first ? 1 : static_cast<int>(visible->size());
  }
  std::error_code error;
  const fs::directory_iterator gpus(fs::path("/proc") / kDriversFolder, error);
  if (error) return std::nullopt;
  return static_cast<int>(std::distance(begin(gpus), end(gpus)));
}

std::string visible_gpu(int index) {
  const auto visible = visible_devices();
  return visible ? visible->at(static_cast<size_t>(index)) : std::to_string(index);
}

std::vector<Gpu> machine_gpus(const fs::path& proc) {
  std::error_code error;
  fs::directory_iterator entry(proc / kDriversFolder, error);
  if (error) return gpus_of_nvml();
  std::vector<Gpu> gpus;
  for (const fs::directory_iterator end; !error && entry != end; entry.increment(error)) {
    gpus.push_back({entry->path().filename(), uuid_in(entry->path() / "information")});
  }
  std::ranges::sort(gpus, {}, &Gpu::address);
  return gpus;
}

std::vector<const Gpu*> visible_gpus(const std::vector<Gpu>& machine) {
  std::vector<const Gpu*> gpus;
  if (const auto visible = visible_devices()) {
    for (const std::string& entry : *visible) gpus.push_back(find_gpu(entry, machine));
  } else {
    for (const Gpu& gpu : machine) gpus.push_back(&gpu);
  }
  return gpus;
}

std::string nvidia_driver_version(const fs::path& proc) {
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"
  std::ifstream file(proc / "driver/nvidia/version");
  for (std::string word; file >> word;) {
    if (word.find_first_not_of("0123456789.") == word.npos) return word;
  }
  const Nvml nvml;
  std::array<char, 80> version{};
  if (!nvml.is_started()) return "";
  nvml.call("nvmlSystemGetDriverVersion", version.data(), static_cast<unsigned>(version.size()));
  return version.data();
}

std::optional<double> gpu_utilization(const std::string& uuid) {
  struct Rates {  // nvmlUtilization_t
    unsigned gpu;
    unsigned memory;
  };
  static const Nvml nvml;
  void* device = nullptr;
  Rates percent{};
  if (!nvml.is_started() || !nvml.call("nvmlDeviceGetHandleByUUID", uuid.c_str(), &device) ||
      !nvml.call("nvmlDeviceGetUtilizationRates", device, &percent)) {
    return std::nullopt;
  }
  return percent.gpu / 100.0;
}

}  // namespace syncbn::base
