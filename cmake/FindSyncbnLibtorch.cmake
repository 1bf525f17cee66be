# Finds libtorch and makes the target syncbn::libtorch (torch_cpu and c10 only).
#
# The CMake package inside a CUDA build of torch demands nvcc and all CUDA libraries, even from a
# program that never touches a GPU; linking torch_cpu and c10 directly needs neither.
#
# Looked for, in this order: Torch_ROOT / Torch_DIR / CMAKE_PREFIX_PATH, the torch that the active
# Python imports, the project's own .venv.
#
# Sets SyncbnLibtorch_FOUND, SyncbnLibtorch_VERSION, SyncbnLibtorch_ROOT (the folder that holds
# include/ and lib/), SyncbnLibtorch_HAS_CUDA, SyncbnLibtorch_RUNTIME_DIRS.

set(_hints ${Torch_ROOT} $ENV{Torch_ROOT})
if(Torch_DIR)
  list(APPEND _hints ${Torch_DIR}/../../..)
endif()
set(_torch_candidates ${_hints})
foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
  list(APPEND _torch_candidates ${prefix} ${prefix}/torch)
endforeach()
string(REPLACE ":" ";" _env_prefixes "$ENV{CMAKE_PREFIX_PATH}")
foreach(prefix IN LISTS _env_prefixes)
  list(APPEND _torch_candidates ${prefix} ${prefix}/torch)
endforeach()

function(_syncbn_torch_of_python python out)
  execute_process(
    COMMAND ${python} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE folder ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE rc)
  if(rc EQUAL 0)
    set(${out} ${folder} PARENT_SCOPE)
  else()
    set(${out} "" PARENT_SCOPE)
  endif()
endfunction()

if(NOT SyncbnLibtorch_ROOT)
  foreach(candidate IN LISTS _torch_candidates)
    if(EXISTS ${candidate}/include/torch/version.h OR EXISTS ${candidate}/include/torch/headeronly/version.h)
      set(SyncbnLibtorch_ROOT ${candidate})
      break()
    endif()
  endforeach()
endif()
if(NOT SyncbnLibtorch_ROOT)
  foreach(python python3 ${PROJECT_SOURCE_DIR}/.venv/bin/python3)
    _syncbn_torch_of_python(${python} _folder)
    if(_folder)
      set(SyncbnLibtorch_ROOT ${_folder})
      break()
    endif()
  endforeach()
endif()

if(SyncbnLibtorch_ROOT)
  get_filename_component(SyncbnLibtorch_ROOT ${SyncbnLibtorch_ROOT} ABSOLUTE)
  foreach(header torch/headeronly/version.h torch/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS ${SyncbnLibtorch_ROOT}/include/${header})
      file(STRINGS ${SyncbnLibtorch_ROOT}/include/${header} _lines
           REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      if(_lines)
        string(REGEX REPLACE "[^0-9;]+" "" _numbers "${_lines}")
        list(JOIN _numbers "." SyncbnLibtorch_VERSION)
        break()
      endif()
    endif()
  endforeach()
endif()

find_library(SyncbnLibtorch_TORCH_CPU torch_cpu PATHS ${SyncbnLibtorch_ROOT}/lib NO_DEFAULT_PATH)
find_library(SyncbnLibtorch_C10 c10 PATHS ${SyncbnLibtorch_ROOT}/lib NO_DEFAULT_PATH)
mark_as_advanced(SyncbnLibtorch_TORCH_CPU SyncbnLibtorch_C10)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  SyncbnLibtorch
  REQUIRED_VARS SyncbnLibtorch_ROOT SyncbnLibtorch_TORCH_CPU SyncbnLibtorch_C10
  VERSION_VAR SyncbnLibtorch_VERSION
  REASON_FAILURE_MESSAGE
    "No libtorch 2.11 to 2.15 was found. Run scripts/setup, or set Torch_ROOT to the folder of torch (python3 -c 'import torch; print(torch.__path__[0])').")

if(SyncbnLibtorch_FOUND AND NOT TARGET syncbn::libtorch)
  if(SyncbnLibtorch_VERSION VERSION_GREATER_EQUAL 2.16)
    message(WARNING "libtorch ${SyncbnLibtorch_VERSION} is newer than 2.15, the newest one tested")
  endif()
  set(SyncbnLibtorch_HAS_CUDA FALSE)
  if(EXISTS ${SyncbnLibtorch_ROOT}/lib/libtorch_cuda.so)
    set(SyncbnLibtorch_HAS_CUDA TRUE)
  endif()
  # A CUDA build of torch_cpu needs libcudart and libcupti; the wheels put them side by side.
  file(GLOB SyncbnLibtorch_RUNTIME_DIRS ${SyncbnLibtorch_ROOT}/../nvidia/*/lib
       ${SyncbnLibtorch_ROOT}/../nvidia/cu*/lib)
  list(REMOVE_DUPLICATES SyncbnLibtorch_RUNTIME_DIRS)
  add_library(syncbn::libtorch INTERFACE IMPORTED)
  target_include_directories(
    syncbn::libtorch SYSTEM INTERFACE ${SyncbnLibtorch_ROOT}/include
                                      ${SyncbnLibtorch_ROOT}/include/torch/csrc/api/include)
  target_link_libraries(syncbn::libtorch INTERFACE ${SyncbnLibtorch_TORCH_CPU}
                                                   ${SyncbnLibtorch_C10})
  target_link_options(syncbn::libtorch INTERFACE -Wl,-rpath-link,${SyncbnLibtorch_ROOT}/lib)
  foreach(dir IN LISTS SyncbnLibtorch_RUNTIME_DIRS)
    target_link_options(syncbn::libtorch INTERFACE -Wl,-rpath-link,${dir})
  endforeach()
endif()
