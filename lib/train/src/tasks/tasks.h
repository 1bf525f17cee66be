#pragma once

// What the tasks of this folder share.

#include <cstdint>
#include <vector>

#include <syncbn/train/task.h>

namespace syncbn::train {

// Each registers one task.
void add_classification(TaskKind::Registry& registry);
void add_segmentation(TaskKind::Registry& registry);

/// `task.class_weights` as a tensor: [num_classes], float32; undefined if the list is empty.
/// @throws base::UserError if its length is another, or all weights are 0.
at::Tensor weights_of_classes(const std::vector<double>& weights, int64_t num_classes);

/// The loss of the network's logits, and `aux_weight` times that of each auxiliary head.
template <class LossOf>
at::Tensor with_auxiliary(const Task::Outputs& outputs, double aux_weight, const LossOf& loss_of) {
  at::Tensor loss = loss_of(outputs.front());
  for (size_t i = 1; i < outputs.size(); ++i) loss = loss + aux_weight * loss_of(outputs[i]);
  return loss;
}

}  // namespace syncbn::train
