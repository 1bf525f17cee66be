#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "detection/average_precision.h"

namespace syncbn::train {

/// An image's truths and detections.
struct BoxImage {
  int64_t id = 0;
  std::vector<Truth> truths;
  std::vector<Detection> detections;
};

/// The input of pycocotools: ids of images, annotations, and results as for COCO.loadRes().
inline nlohmann::json to_json(const std::vector<BoxImage>& images) {
  const auto box_of = [](const PixelBox& box) {
    return nlohmann::json{box.x, box.y, box.width, box.height};
  };
  nlohmann::json ids = nlohmann::json::array();
  nlohmann::json truths = nlohmann::json::array();
  nlohmann::json detections = nlohmann::json::array();
  for (const BoxImage& image : images) {
    ids.push_back(image.id);
    for (const Truth& truth : image.truths) {
      truths.push_back({{"id", truths.size() + 1},
                        {"image_id", image.id},
                        {"category_id", truth.label},
                        {"bbox", box_of(truth.box)},
                        {"area", truth.area},
                        {"iscrowd", truth.is_crowd ? 1 : 0}});
    }
    for (const Detection& one : image.detections) {
      detections.push_back({{"image_id", image.id},
                            {"category_id", one.label},
                            {"bbox", box_of(one.box)},
                            {"score", one.score}});
    }
  }
  return {{"images", ids}, {"truths", truths}, {"detections", detections}};
}

}  // namespace syncbn::train
