#include "report/embedded_picture.h"

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/text.h>
#include <syncbn/data/image.h>
#include <syncbn/data/image_ops.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "records/run_files.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

std::optional<PictureFile> picture_of(const fs::path& path) {
  const std::string stem = path.stem().string();
  const size_t dash = stem.rfind('-');
  if (path.extension() != ".png" || dash == std::string::npos) return std::nullopt;
  const auto step = base::parse_number<int64_t>(std::string_view(stem).substr(dash + 1));
  if (!step) return std::nullopt;
  return PictureFile{.path = path, .name = stem.substr(0, dash), .step = *step};
}

std::vector<PictureFile> evenly(const std::vector<PictureFile>& all, size_t limit) {
  if (all.size() <= limit) return all;
  std::vector<PictureFile> chosen;
  for (size_t i = 0; i < limit; ++i) chosen.push_back(all[i * (all.size() - 1) / (limit - 1)]);
  return chosen;
}

}  // namespace

std::vector<PictureFile> pictures_of(const fs::path& folder, size_t limit) {
  std::map<std::string, std::vector<PictureFile>> by_name;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder / run_files::kPictures, ignored)) {
    if (auto picture = picture_of(entry.path())) by_name[picture->name].push_back(*picture);
  }
  std::vector<PictureFile> chosen;
  for (auto& [name, all] : by_name) {
    std::ranges::sort(all, {}, &PictureFile::step);
    const auto some = evenly(all, limit);
    chosen.insert(chosen.end(), some.begin(), some.end());
  }
  return chosen;
}

EmbeddedPicture embedded_picture(const fs::path& file, size_t max_bytes) {
  const std::string bytes = base::read_file(file);
  const auto* const begin = reinterpret_cast<const uint8_t*>(bytes.data());
  data::ImageDecoder decoder({begin, bytes.size()}, file.string());
  EmbeddedPicture picture{.width = decoder.width(), .height = decoder.height()};
  if (bytes.size() <= max_bytes) {
    picture.address = "data:image/png;base64," + base64(bytes);
    return picture;
  }
  constexpr int kQuality = 80;
  constexpr int kMaxTries = 6;
  data::Image image = decoder.decode();
  std::string jpeg = data::encode_jpeg(image, kQuality);
  for (int i = 0; i < kMaxTries && jpeg.size() > max_bytes; ++i) {
    // A smaller JPEG needs somewhat more bytes per pixel.
    const double scale =
        0.9 * std::sqrt(static_cast<double>(max_bytes) / static_cast<double>(jpeg.size()));
    const auto shrunk = [&](int64_t side) {
      return std::max<int64_t>(1, std::llround(static_cast<double>(side) * scale));
    };
    image = data::resize(image, shrunk(image.width), shrunk(image.height));
    jpeg = data::encode_jpeg(image, kQuality);
  }
  picture.address = "data:image/jpeg;base64," + base64(jpeg);
  return picture;
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    uint32_t group = 0;
    for (size_t k = 0; k < 3; ++k) {
      group = group << 8 | (k < count ? static_cast<uint8_t>(bytes[i + k]) : 0U);
    }
    for (size_t k = 0; k < 4; ++k) {
      text += k <= count ? kDigits[group >> (18 - 6 * k) & 63] : '=';
    }
  }
  return text;
}

}  // namespace syncbn::train
