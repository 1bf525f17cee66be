#pragma once

#include <cstdint>

#include <syncbn/data/loader.h>

namespace syncbn::data::detail {

/// This rank's samples per batch. @throws base::UserError if the options are contradictory.
int64_t choose_batch_size(const LoaderOptions& options, int num_replicas);

/// @throws base::UserError for an option that is out of range.
void check_ranges(const LoaderOptions& options);

/// Whether batches should be in pinned memory. Warns once if that was asked for without a GPU.
bool pins_memory(const LoaderOptions& options);

/// @param num_samples this rank's samples per epoch.
/// @throws base::UserError if a run over `dataset` in the order of `sampler` cannot resume at
///   `state`.
void check_resumable(const SamplerState& state, const Dataset& dataset, const Sampler& sampler,
                     int64_t num_samples);

}  // namespace syncbn::data::detail
