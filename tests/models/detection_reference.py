"""Writes the reference for detection_test.cpp with torch.save.

    python detection_reference.py nms|networks FILE

A dictionary of tensors. With networks, NETWORK.CASE.* are for detectors with random predictions: anchors, logits,
regression, centerness; the detections in two images of the sizes `sizes`; and loss and gradients for the boxes in
`target`, in float64. With nms, nms.I.* are for batched_nms.
"""

import sys

import torch
from torchvision.models import detection
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import batched_nms

CLASSES = 5
PADDED = [128, 224]
SIZES = [(128, 200), (100, 224)]
LEVELS = [(16, 28), (8, 14), (4, 7), (2, 4), (1, 2)]
LIMITS = {"score_thresh": 0.3, "nms_thresh": 0.4, "detections_per_img": 7, "topk_candidates": 20}
OPTIONS = {
    "retinanet_resnet50_fpn": {**LIMITS, "fg_iou_thresh": 0.6, "bg_iou_thresh": 0.3},
    "retinanet_resnet50_fpn_v2": {**LIMITS, "fg_iou_thresh": 0.6, "bg_iou_thresh": 0.3},
    "fcos_resnet50_fpn": {**LIMITS, "center_sampling_radius": 0.9},
}
# Label, x1, y1, x2, y2. Two boxes are equal; others are too small, too flat or too far out for anchors.
TARGET = [
    [
        [0, 10, 20, 90, 100], [1, 10, 20, 90, 100], [4, 12.5, 30.25, 61, 77.5], [2, 0, 0, 200, 128],
        [3, 150, 100, 151, 101], [3, 60, 60, 61.5, 127], [1, 199.5, 127.5, 200, 128],
        [2, 24, 24, 40, 40],
    ],
    [[4, 100.3, 5.7, 180.1, 95.2], [0, 3, 3, 35, 60]],
]  # fmt: skip


def save_nms(saved):
    for i, (count, classes, threshold) in enumerate([(60, 1, 0.5), (400, 3, 0.6), (3000, 4, 0.3)]):
        # Whole pixels and few scores, so that IoUs equal the threshold and scores equal each other.
        corners = torch.randint(0, 60, (count, 2))
        boxes = torch.cat([corners, corners + torch.randint(1, 40, (count, 2))], 1).float()
        scores = torch.randint(0, 50, (count,)) / 50
        labels = torch.randint(0, classes, (count,))
        saved[f"nms.{i}.boxes"], saved[f"nms.{i}.scores"] = boxes, scores
        saved[f"nms.{i}.labels"] = labels
        saved[f"nms.{i}.threshold"] = torch.tensor(threshold, dtype=torch.float64)
        # For up to 1000 boxes, equal scores keep the order of the boxes; with more boxes, any order.
        kept = batched_nms(boxes, scores, labels, threshold).sort().values
        saved[f"nms.{i}.kept"] = kept[scores[kept].sort(descending=True, stable=True).indices]


def random_predictions(anchors, is_fcos):
    names = ["cls_logits", "bbox_regression"]
    outputs = [torch.randn(2, anchors, CLASSES) * 1.5 - 2, torch.randn(2, anchors, 4) * 0.5]
    if is_fcos:
        outputs[1] = (outputs[1] * 6).relu()
        outputs.append(torch.randn(2, anchors, 1))
        names.append("bbox_ctrness")
    return dict(zip(names, outputs))


def loss_of(model, outputs, anchors, places, is_fcos):
    targets = [
        {"labels": torch.tensor([int(row[0]) for row in rows]),
         "boxes": torch.tensor([row[1:] for row in rows], dtype=torch.float64)}
        for rows in TARGET
    ]  # fmt: skip
    losses = model.compute_loss(targets, outputs, anchors, *([places] if is_fcos else []))
    return sum(losses.values())


def save_network(saved, prefix, name, options):
    is_fcos = name.startswith("fcos")
    model = getattr(detection, name)(weights_backbone=None, num_classes=CLASSES, **options)
    images = ImageList(torch.zeros(2, 3, *PADDED), SIZES)
    anchors = model.anchor_generator(images, [torch.zeros(2, 1, *size) for size in LEVELS])
    places = [height * width for height, width in LEVELS]
    per_place = anchors[0].shape[0] // sum(places)
    counts = [per_place * count for count in places]
    outputs = random_predictions(anchors[0].shape[0], is_fcos)
    saved[f"{prefix}.anchors"] = anchors[0].clone()
    for key, value in outputs.items():
        saved[f"{prefix}.{key}"] = value

    found = model.postprocess_detections(
        {key: value.split(counts, dim=1) for key, value in outputs.items()},
        [each.split(counts) for each in anchors],
        SIZES,
    )
    for i, image in enumerate(found):
        for key, value in image.items():
            saved[f"{prefix}.{key}.{i}"] = value.clone()

    outputs = {key: value.double().requires_grad_() for key, value in outputs.items()}
    loss = loss_of(model, outputs, [each.double() for each in anchors], places, is_fcos)
    loss.backward()
    saved[f"{prefix}.loss"] = loss.detach()
    for key, value in outputs.items():
        saved[f"{prefix}.{key}.grad"] = value.grad


torch.manual_seed(0)
tensors = {"sizes": torch.tensor(SIZES)}
rows = max(map(len, TARGET))
tensors["target"] = torch.full([2, 1 + rows, 5], -1, dtype=torch.float64)
for image, boxes in zip(tensors["target"], TARGET):
    image[1 : 1 + len(boxes)] = torch.tensor(boxes, dtype=torch.float64)
if sys.argv[1] == "nms":
    save_nms(tensors)
for network, options in OPTIONS.items() if sys.argv[1] == "networks" else ():
    save_network(tensors, f"{network}.defaults", network, {})
    save_network(tensors, f"{network}.options", network, options)
torch.save(tensors, sys.argv[2])
