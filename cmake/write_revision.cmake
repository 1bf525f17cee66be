# Writes revision.cpp, which tells what source the program was built from: the commit, and a hash of what was changed
# since. Empty outside of a git checkout. The file is left alone if it is up to date.
#   cmake -D SOURCE=... -D OUT=.../revision.cpp -P write_revision.cmake
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
file(CONFIGURE OUTPUT "${OUT}" CONTENT [[
#include "common/revision.h"

namespace syncbn::train {
const char* const kRevision = "@revision@";
}
]] @ONLY)
