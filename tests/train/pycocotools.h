#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/program.h"
#include "support/python.h"
#include "support/temp_folder.h"
#include "train/box_images.h"

namespace syncbn::train {

/// Prints the 12 figures, and the average precision of each class.
inline constexpr const char* kCocoReference = R"(
import contextlib, io, json, sys
import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
data = json.load(open(sys.argv[1]))
with contextlib.redirect_stdout(io.StringIO()):
    truth = COCO()
    truth.dataset = {"info": {}, "images": [{"id": i} for i in data["images"]], "annotations": data["truths"],
                     "categories": [{"id": i} for i in range(int(sys.argv[2]))]}
    truth.createIndex()
    done = COCOeval(truth, truth.loadRes(data["detections"]), "bbox")
    done.evaluate()
    done.accumulate()
    done.summarize()
classes = [p[p > -1] for p in np.moveaxis(done.eval["precision"][:, :, :, 0, -1], 2, 0)]
print(json.dumps([*done.stats, *(p.mean() if p.size else -1 for p in classes)]))
)";

/// The 12 figures and the average precision of each class, which is -1 for a class without truths.
/// Fails the test if Python fails.
inline std::vector<double> figures_of_pycocotools(const std::vector<BoxImage>& images,
                                                  size_t classes) {
  const test::TempFolder folder;
  const std::string file = folder.write("images.json", to_json(images).dump());
  const auto answer =
      test::run_program({test::python(), "-c", kCocoReference, file, std::to_string(classes)});
  EXPECT_EQ(answer.exit_code, 0) << answer.err;
  return answer.exit_code == 0 ? nlohmann::json::parse(answer.out).get<std::vector<double>>()
                               : std::vector<double>();
}

}  // namespace syncbn::train
