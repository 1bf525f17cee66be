#pragma once

#include <cstddef>

namespace syncbn::base {

/// Makes malloc keep freed memory instead of returning it to the kernel, which would clear it again
/// at each step of a training loop (a fifth of a step of ResNet-18 on one CPU thread). Also
/// requests huge pages for the heap, and reserves addresses for it in advance. For programs with a
/// repeating pattern of allocations; call it early in main(). Does nothing if the user has set
/// MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES.
void keep_freed_memory();

/// Advises the kernel to use huge pages for a new block from malloc. Call it before writing to the
/// block: page faults and address translation of small pages may cost most of a loop's time. After
/// keep_freed_memory() this covers all of the heap's growth so far, and grows the heap further
/// ahead of use. Does nothing for blocks below 2 MiB. Thread-safe.
void advise_huge_pages(void* block, size_t bytes);

}  // namespace syncbn::base
