#include <syncbn/data/sample_dataset.h>

#include <fmt/format.h>

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <exception>
#include <numbers>
#include <numeric>
#include <optional>
#include <set>

#include <syncbn/base/text.h>
#include <syncbn/data/boxes.h>

namespace syncbn::data {
namespace {

/// Values of at most 12 bits are below this after they were scaled from 16 to 8 bits.
constexpr int kDark = 16;
constexpr const char* kDarkAdvice =
    "; scaled images would be almost black: if their values need 8 bits, set data.high_bits=clamp; "
    "if they need 10 or 12, multiply them by 64 or 16 and save the images again";

/// What the samples that were looked into hold.
struct Seen {
  int64_t samples = 0;            ///< without damaged ones
  int64_t rotated = 0, deep = 0;  ///< images
  std::string first_rotated, first_deep;
  int largest_scaled = 0;                       ///< of deep images
  std::optional<std::bitset<256>> labels = {};  ///< of pixels
  std::bitset<256> with_ignored;                ///< labels in masks that have the ignored one
  const char* looked_at = " looked at";         ///< "" if these are all samples
};

Seen look_into(const SampleDataset& set, std::chrono::milliseconds limit) {
  // Steps of the golden ratio divide the largest gaps; without a common divisor with the size, they
  // lead to each sample once.
  const int64_t size = set.size();
  auto step = static_cast<int64_t>(static_cast<double>(size) / std::numbers::phi);
  while (std::gcd(step, size) > 1) ++step;
  const auto end = std::chrono::steady_clock::now() + limit;
  const auto ignored = static_cast<size_t>(set.ignore_index());
  Seen seen;
  for (int64_t i = 0; i < size && std::chrono::steady_clock::now() < end; ++i) {
    const int64_t index = i * step % size;
    try {
      const SampleFacts facts = set.facts(index);
      if (facts.orientation != 1 && seen.rotated++ == 0) seen.first_rotated = set.name_of(index);
      if (facts.largest_scaled && seen.deep++ == 0) seen.first_deep = set.name_of(index);
      seen.largest_scaled = std::max(seen.largest_scaled, facts.largest_scaled.value_or(0));
      if (facts.labels) seen.labels = seen.labels.value_or(0) | *facts.labels;
      if (facts.labels && ignored < 256 && facts.labels->test(ignored))
        seen.with_ignored |= *facts.labels;
      ++seen.samples;
    } catch (const std::exception&) {  // read_sample() reports it
    }
  }
  if (seen.samples == size) seen.looked_at = "";
  return seen;
}

std::string missing_classes(const Dataset& dataset, const Seen& seen) {
  constexpr size_t kShown = 10;
  const auto* const boxes = dynamic_cast<const BoxDataset*>(&dataset);
  std::set<int64_t> found(dataset.labels().begin(), dataset.labels().end());
  for (int64_t index = 0; boxes != nullptr && index < boxes->size(); ++index) {
    // -1: the boxes are known, and this one is not learned from.
    for (const auto& box : boxes->annotations(index)) found.insert(is_target(box) ? box.label : -1);
  }
  if (found.empty() && !seen.labels) return {};  // nothing is known about the classes
  const std::vector<std::string> names = dataset.class_names();
  std::vector<std::string> missing;
  for (int64_t label = 0; label < dataset.num_classes(); ++label) {
    const auto at = static_cast<size_t>(label);
    // SampleFacts cannot hold all labels that a custom data set may have.
    if (seen.labels ? at > 255 || seen.labels->test(at) : found.contains(label)) continue;
    missing.push_back(at < names.size() ? base::printable(names[at]) : std::to_string(label));
  }
  if (missing.empty()) return {};
  const char* const unit = seen.labels ? "pixel" : boxes != nullptr ? "box" : "sample";
  const std::string masks = base::counted(seen.samples, "mask") + seen.looked_at;
  return fmt::format("no {} of class {}{}", unit, base::join_some(missing, ", ", kShown),
                     seen.labels ? " in " + masks : "");
}

/// For masks of 0 and 255, as image editors and OpenCV write them, perhaps beside others of 0
/// and 1.
std::string two_values(int64_t ignored, const Seen& seen) {
  if (ignored < 1 || ignored > 255) return {};
  if (seen.with_ignored != std::bitset<256>().set(0).set(static_cast<size_t>(ignored))) return {};
  std::bitset<256> others = seen.labels.value_or(0);
  if (others.reset(0).reset(1).reset(static_cast<size_t>(ignored)).any()) return {};  // labels
  return fmt::format(
      "the masks{1}{2} hold only 0 and {0}, and {0} is ignored; if it marks objects, save 1 "
      "instead, or set data.classes=2 data.mask_values=[0,{0}] of a segmentation_folder",
      ignored, seen.looked_at,
      seen.with_ignored == seen.labels ? "" : fmt::format(" that have {}", ignored));
}

}  // namespace

std::vector<std::string> survey(const Dataset& dataset, Split split,
                                std::chrono::milliseconds limit, const std::string& name) {
  const auto* const samples = dynamic_cast<const SampleDataset*>(&dataset);
  const Seen seen = samples != nullptr ? look_into(*samples, limit) : Seen();
  std::vector<std::string> lines;
  const auto add = [&](const std::string& text) {
    if (!text.empty())
      lines.push_back(fmt::format("{}: {}", name.empty() ? to_string(split) : name, text));
  };
  const std::string images = base::counted(seen.samples, "image") + seen.looked_at;
  if (seen.rotated > 0) {
    add(fmt::format(
        "{} of {} are stored rotated (EXIF orientation), such as '{}'; data.exif_orientation=true "
        "turns them upright, as viewers and labelling tools do",
        seen.rotated, images, seen.first_rotated));
  }
  if (seen.deep > 0) {
    add(fmt::format(
        "{} of {} have values of 16 bits, such as '{}'; data.high_bits=scale keeps the upper 8 "
        "bits (the largest value seen is then {} of 255), clamp makes values above 255 white{}",
        seen.deep, images, seen.first_deep, seen.largest_scaled,
        seen.largest_scaled < kDark ? kDarkAdvice : ""));
  }
  // Masks that nobody looked into may have the class: for training, a doubt is worth a line.
  if (!seen.labels || split == Split::kTrain || seen.samples == dataset.size()) {
    add(missing_classes(dataset, seen));
  }
  if (samples != nullptr) add(two_values(samples->ignore_index(), seen));
  return lines;
}

}  // namespace syncbn::data
