#pragma once

#include <cstdint>

#include <syncbn/data/loader.h>

namespace syncbn::data::detail {

/// This rank's samples in a batch. @throws base::UserError where the options have none.
int64_t choose_batch_size(const LoaderOptions& options, int num_replicas);

/// @throws base::UserError for a number that is out of its range.
void check(const LoaderOptions& options);

/// Whether batches are to be in pinned memory; says where that is asked for in vain.
bool pins_memory(const LoaderOptions& options);

}  // namespace syncbn::data::detail
