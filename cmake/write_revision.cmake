# Writes what a program and its plug-ins were built from. Files that are up to date keep their time stamps.
#   cmake -D SOURCE=... -D OUT=folder -P write_revision.cmake

# revision.cpp: the commit, and a hash of the changes to lib/ and apps/ since. Empty outside a git checkout.
set(revision "")
execute_process(COMMAND git -C "${SOURCE}" rev-parse --short=12 HEAD OUTPUT_VARIABLE commit
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE code)
if(code EQUAL 0)
  set(revision "${commit}")
  execute_process(COMMAND git -C "${SOURCE}" diff HEAD -- lib apps OUTPUT_VARIABLE changes ERROR_QUIET)
  if(changes)
    string(SHA1 hash "${changes}")
    string(SUBSTRING "${hash}" 0 8 hash)
    string(APPEND revision "-${hash}")
  endif()
endif()
file(CONFIGURE OUTPUT "${OUT}/revision.cpp" CONTENT [[
#include "common/revision.h"

namespace syncbn::train {
const char* const kRevision = "@revision@";
}
]] @ONLY)

# headers_digest.h: a digest of the public headers. Classes may change without a new version number.
file(GLOB_RECURSE headers RELATIVE "${SOURCE}" "${SOURCE}/lib/*/include/*.h")
list(SORT headers)
set(digests "")
foreach(header IN LISTS headers)
  file(SHA256 "${SOURCE}/${header}" digest)
  string(APPEND digests "${header} ${digest}\n")
endforeach()
string(SHA256 digest "${digests}")
string(SUBSTRING "${digest}" 0 12 digest)
file(CONFIGURE OUTPUT "${OUT}/include/syncbn/train/headers_digest.h" CONTENT [[
#pragma once

// The build writes this file: a digest of all public headers, for SYNCBN_PLUGIN_ABI.
#define SYNCBN_DETAIL_HEADERS_DIGEST "@digest@"
]] @ONLY)
