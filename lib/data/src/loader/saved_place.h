#pragma once

#include <cstdint>

#include <syncbn/data/dataset.h>
#include <syncbn/data/sampler.h>

namespace syncbn::data::detail {

/// Whether a run over `dataset` in the order of `sampler` can go on at a saved place. `usable`:
/// this rank's samples of an epoch that are given out.
/// @throws base::UserError saying why not.
void check_saved_place(const SamplerState& state, const Dataset& dataset, const Sampler& sampler,
                       int64_t usable);

}  // namespace syncbn::data::detail
