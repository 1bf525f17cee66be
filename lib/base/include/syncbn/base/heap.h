#pragma once

#include <cstddef>

namespace syncbn::base {

/// Lets malloc keep what is freed instead of handing it back to the kernel, which would have to
/// clear it again at each step of a training loop (a fifth of a step of ResNet-18 on one CPU
/// thread), and asks for huge pages for the heap, of which it takes addresses in advance. For
/// programs whose use of memory repeats itself; call it early in main(). Does nothing where the
/// user has set MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES, or where malloc
/// is not glibc's.
void keep_freed_memory();

/// Asks the kernel for huge pages under a block of malloc's that is about to be written: with
/// small ones most of the time of a loop may go into page faults and address translation. After
/// keep_freed_memory() this asks for all that the heap has grown by, and has it grow further ahead
/// of use. Only advice: where there are none, or the block is too small, nothing happens.
/// Thread-safe.
void advise_huge_pages(void* block, size_t bytes);

}  // namespace syncbn::base
