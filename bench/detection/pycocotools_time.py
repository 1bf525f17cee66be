"""Counterpart of average_precision.cpp with pycocotools: evaluate() and accumulate(), after the file is read."""

import contextlib
import io
import json
import sys
import time

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

CLASSES = 80


def main():
    with open(sys.argv[1]) as file:
        data = json.load(file)
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet):
        truth = COCO()
        truth.dataset = {"info": {}, "images": [{"id": i} for i in data["images"]],
                         "annotations": data["truths"], "categories": [{"id": i} for i in range(CLASSES)]}
        truth.createIndex()
        results = truth.loadRes(data["detections"])
    for _ in sys.stdin:
        evaluation = COCOeval(truth, results, "bbox")
        with contextlib.redirect_stdout(quiet):
            begin = time.perf_counter()
            evaluation.evaluate()
            evaluation.accumulate()
            seconds = time.perf_counter() - begin
            evaluation.summarize()
        print(json.dumps({"seconds": seconds, "map": evaluation.stats[0]}), flush=True)


if __name__ == "__main__":
    main()
