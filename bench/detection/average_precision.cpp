// Times average precision over 5,000 random images with 100 detections each, of 80 classes. Writes
// the images to the given file for pycocotools, then measures once for each line of standard input.
#include <chrono>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "detection/average_precision.h"
#include "train/box_images.h"

namespace {

using namespace syncbn::train;

constexpr int64_t kImages = 5000;
constexpr size_t kClasses = 80;
constexpr int kTruths = 7;  // per image, as in COCO
constexpr int kDetections = 100;

/// Places a third of the detections near a ground-truth box.
std::vector<BoxImage> make_images() {
  std::mt19937 random(1);
  const auto below = [&](uint32_t bound) { return static_cast<double>(random() % bound); };
  const auto box = [&] { return PixelBox{below(500), below(400), 8 + below(200), 8 + below(200)}; };
  std::vector<BoxImage> images(kImages);
  for (int64_t i = 0; i < kImages; ++i) {
    BoxImage& image = images[static_cast<size_t>(i)];
    image.id = i + 1;
    for (int k = 0; k < kTruths; ++k) {
      const PixelBox own = box();
      image.truths.push_back({.label = static_cast<int64_t>(below(kClasses)),
                              .box = own,
                              .area = own.width * own.height / 2,
                              .is_crowd = below(100) == 0});
    }
    for (int k = 0; k < kDetections; ++k) {
      Detection one{static_cast<int64_t>(below(kClasses)), below(1 << 20) / (1 << 20), box()};
      if (k % 3 == 0) {
        const Truth& near = image.truths[random() % kTruths];
        one.label = near.label;
        one.box = near.box;
        one.box.x += below(40) - 20;
      }
      image.detections.push_back(one);
    }
  }
  return images;
}

double mean_average_precision(const std::vector<BoxImage>& images) {
  std::vector<MatchedDetection> matched;
  std::vector<int64_t> counts(kClasses * kNumAreas);
  for (const BoxImage& image : images) {
    const auto own = match(image.id, image.truths, image.detections);
    matched.insert(matched.end(), own.begin(), own.end());
    count_truths(image.truths, counts);
  }
  return average_precision(std::move(matched), counts).summary[0];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: average_precision_time FILE\n";
    return 2;
  }
  const std::vector<BoxImage> images = make_images();
  std::ofstream(argv[1]) << to_json(images);
  for (std::string line; std::getline(std::cin, line);) {
    const auto begin = std::chrono::steady_clock::now();
    const double map = mean_average_precision(images);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::cout << nlohmann::json{{"seconds", seconds.count()}, {"map", map}} << std::endl;
  }
  return 0;
}
