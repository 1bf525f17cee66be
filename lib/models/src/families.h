#pragma once

#include <syncbn/models/model_kind.h>

namespace syncbn::models {

// Each function registers the networks of one file, under torchvision's names.
void add_resnets(ModelKind::Registry& registry);
void add_vggs(ModelKind::Registry& registry);
void add_mobilenets(ModelKind::Registry& registry);
void add_efficientnets(ModelKind::Registry& registry);
void add_densenets(ModelKind::Registry& registry);
void add_regnets(ModelKind::Registry& registry);
void add_convnexts(ModelKind::Registry& registry);
void add_shufflenets(ModelKind::Registry& registry);
void add_mnasnets(ModelKind::Registry& registry);
void add_gans(ModelKind::Registry& registry);
void add_inceptions(ModelKind::Registry& registry);
void add_segmentation_networks(ModelKind::Registry& registry);
void add_retinanets(ModelKind::Registry& registry);
void add_fcos(ModelKind::Registry& registry);
void add_squeezenets(ModelKind::Registry& registry);

}  // namespace syncbn::models
