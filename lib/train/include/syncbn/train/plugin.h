#pragma once

// What a plug-in of `train` contains besides its networks, data sets and so on (docs/extending.md):
//
//   void register_mine() {
//     models::ModelKind::registry().add<MyOptions>("mine", "what it is", make_mine);
//   }
//   SYNCBN_PLUGIN(register_mine)
//
// syncbn_add_plugin() of the CMake package builds it, and `plugins: [libmine.so]` loads it.

#include <syncbn/train/headers_digest.h>
#include <torch/version.h>

#ifndef SYNCBN_VERSION
#error "SYNCBN_VERSION is not defined; build the plug-in by syncbn_add_plugin()"
#endif

#define SYNCBN_DETAIL_TEXT_OF(value) #value
#define SYNCBN_DETAIL_TEXT(value) SYNCBN_DETAIL_TEXT_OF(value)

#ifdef _LIBCPP_ABI_VERSION
#define SYNCBN_DETAIL_LIBRARY "libc++ with ABI " SYNCBN_DETAIL_TEXT(_LIBCPP_ABI_VERSION)
#elif defined(_GLIBCXX_DEBUG)
#define SYNCBN_DETAIL_LIBRARY "libstdc++ with _GLIBCXX_DEBUG"
#else
#define SYNCBN_DETAIL_LIBRARY \
  "libstdc++ with _GLIBCXX_USE_CXX11_ABI=" SYNCBN_DETAIL_TEXT(_GLIBCXX_USE_CXX11_ABI)
#endif

#define SYNCBN_DETAIL_LIBTORCH \
  SYNCBN_DETAIL_TEXT(TORCH_VERSION_MAJOR) "." SYNCBN_DETAIL_TEXT(TORCH_VERSION_MINOR)

/// What a plug-in and the program that loads it must have in common; each part ends with '|'.
/// libtorch's binary interface changes between minor versions.
#define SYNCBN_PLUGIN_ABI                                                                \
  "syncbn " SYNCBN_VERSION "|libtorch " SYNCBN_DETAIL_LIBTORCH "|" SYNCBN_DETAIL_LIBRARY \
  "|headers of syncbn with digest " SYNCBN_DETAIL_HEADERS_DIGEST "|"

/// Makes a shared library a plug-in: `train` loads it, then calls `register_all()`. Use it once per
/// library, outside all namespaces. A program that calls train::run_main() may contain it as well.
#define SYNCBN_PLUGIN(register_all)                                            \
  extern "C" {                                                                 \
  /* `train` reads the text in the file: loading a different ABI may crash. */ \
  [[gnu::visibility("default")]] extern const char syncbn_plugin_abi[];        \
  const char syncbn_plugin_abi[] = "syncbn-plugin|" SYNCBN_PLUGIN_ABI;         \
  [[gnu::visibility("default")]] void syncbn_register_plugin() {               \
    register_all();                                                            \
  }                                                                            \
  }                                                                            \
  static_assert(true)
