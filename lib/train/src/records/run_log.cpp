#include "records/run_log.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <sys/stat.h>

#include <fstream>
#include <string_view>
#include <utility>

#include "records/log_record.h"
#include "records/run_files.h"

namespace syncbn::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kStepLine = R"({"event":"step")";

}  // namespace

RunLog::RunLog(const std::filesystem::path& folder) : path_(folder / run_files::kLog) {}

bool RunLog::is_replaced() {
  struct stat status {};
  if (::stat(path_.c_str(), &status) != 0) return false;  // someone has removed the folder
  changed_ = static_cast<double>(status.st_mtim.tv_sec);
  const bool is_other = status.st_ino != std::exchange(file_, status.st_ino);
  if (!is_other && status.st_size >= read_) return false;
  return std::exchange(read_, 0) > 0;
}

void check_format(const std::filesystem::path& folder, const Json& start) {
  const auto version = field_of<int64_t>(start, kLogVersionKey, 1);
  if (version <= kLogVersion) return;
  throw base::UserError(
      fmt::format("{} is the run of a newer version of train (its log has format {}, this version "
                  "reads up to {}); use that version",
                  folder.string(), version, kLogVersion));
}

void RunLog::read(ReadSteps steps, const std::function<void(const Json& line)>& take) {
  if (base::is_missing(path_)) return;
  base::open_regular_file(path_);  // an ifstream would wait for the writer of a FIFO
  std::ifstream file(path_);
  file.seekg(read_);
  for (std::string line; std::getline(file, line) && !file.eof();) {
    read_ = file.tellg();
    if (steps == ReadSteps::kNo && line.starts_with(kStepLine)) continue;
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) {
      take(json);
    } else {
      ++damaged_;
    }
  }
}

}  // namespace syncbn::train
