#include "records/run_log.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "records/log_record.h"
#include "records/run_files.h"

namespace syncbn::train {

using Json = nlohmann::ordered_json;

constexpr std::string_view kStepLine = R"({"event":"step")";

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
  const auto take_line = [&](std::string_view line) {
    if (steps == ReadSteps::kNo && line.starts_with(kStepLine)) return;
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) {
      take(json);
    } else {
      ++damaged_;
    }
  };
  const base::UniqueFd file = base::open_regular_file(path_);
  std::string text;  // from read_ on
  std::array<char, 65536> chunk;
  for (;;) {
    const off_t end = read_ + std::ssize(text);
    const ssize_t size = ::pread(file.get(), chunk.data(), chunk.size(), end);
    if (size <= 0) return;
    size_t searched = text.size();
    text.append(chunk.data(), static_cast<size_t>(size));
    size_t begin = 0;
    for (size_t at = 0; (at = text.find('\n', searched)) != text.npos; searched = begin = at + 1) {
      const std::string_view line = std::string_view(text).substr(begin, at - begin);
      read_ += std::ssize(line) + 1;
      take_line(line);
    }
    text.erase(0, begin);
  }
}

}  // namespace syncbn::train
