"""Prints the values that TensorBoard's own reader finds in a folder for a tag, a line per step; for the tag
"hparams", the hyperparameters and the status. Without a tag: all scalars as JSON, {tag: [[step, value], ...]}.

  read_events.py FOLDER [TAG]
"""

import json
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

# 0: all values of a kind instead of a sample.
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "images": 0, "histograms": 0})
events.Reload()
tags = events.Tags()


def hyperparameters(tag):
    try:
        content = events.SummaryMetadata(tag).plugin_data.content
    except KeyError:
        return plugin_data_pb2.HParamsPluginData()
    return plugin_data_pb2.HParamsPluginData.FromString(content)


if len(sys.argv) < 3:
    print(json.dumps({tag: [[event.step, event.value] for event in events.Scalars(tag)]
                      for tag in tags["scalars"]}))
elif sys.argv[2] == "hparams":
    start = hyperparameters("_hparams_/session_start_info").session_start_info
    for name, value in sorted(start.hparams.items()):
        print(name, repr(getattr(value, value.WhichOneof("kind"))))
    print("status", hyperparameters("_hparams_/session_end_info").session_end_info.status)
elif sys.argv[2] in tags["scalars"]:
    for event in events.Scalars(sys.argv[2]):
        print(event.step, event.value)
elif sys.argv[2] in tags["images"]:
    for event in events.Images(sys.argv[2]):
        assert event.encoded_image_string.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", event.encoded_image_string[16:24])
        assert (width, height) == (event.width, event.height)
        print(event.step, f"{width}x{height}")
elif sys.argv[2] in tags["histograms"]:
    for event in events.Histograms(sys.argv[2]):
        values = event.histogram_value
        assert list(values.bucket_limit) == sorted(values.bucket_limit)
        assert sum(values.bucket) == values.num
        print(event.step, values.min, values.max, values.num, values.sum, values.sum_squares,
              list(values.bucket_limit), list(values.bucket))
