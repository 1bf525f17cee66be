# Finds libtorch and makes the target syncbn::libtorch (torch_cpu and c10 only).
#
# The CMake package inside a CUDA build of torch demands nvcc and all CUDA libraries, even from a
# program that never touches a GPU; linking torch_cpu and c10 directly needs neither.
#
# Searches, in this order:
#   1. Torch_ROOT or Torch_DIR (cache or environment), then CMAKE_PREFIX_PATH (likewise);
#   2. what an earlier configure of this build folder found;
#   3. SyncbnLibtorch_HINTS, which syncbn's own CMake package sets to the libtorch it was built with;
#   4. the torch of Python_EXECUTABLE (set by scikit-build-core) or of the active Python (python3);
#   5. the project's own .venv, where scripts/setup installs torch.
# From 1 to 3, a version that is too old is an error, and one that is too new a warning; 4 and 5 skip both.
#
# Sets SyncbnLibtorch_FOUND, SyncbnLibtorch_VERSION, SyncbnLibtorch_ROOT (the folder that holds
# include/ and lib/) and SyncbnLibtorch_HAS_CUDA (it contains libtorch_cuda).

set(_syncbn_torch_oldest 2.11)
set(_syncbn_torch_newest 2.15)

# Sets `out` to a version such as "2.11.0", or to "" if `folder` has no libtorch with headers.
function(_syncbn_torch_version folder out)
  set(${out} "" PARENT_SCOPE)
  foreach(header torch/headeronly/version.h torch/version.h torch/csrc/api/include/torch/version.h)
    set(path ${folder}/include/${header})
    if(EXISTS ${path} AND EXISTS ${folder}/lib)
      file(STRINGS ${path} lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      if(lines)
        string(REGEX REPLACE "[^0-9;]+" "" numbers "${lines}")
        list(JOIN numbers "." version)
        set(${out} ${version} PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()

# Whether this project was built and tested with this version.
function(_syncbn_torch_supported version out)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  if(minor VERSION_GREATER_EQUAL _syncbn_torch_oldest AND minor VERSION_LESS_EQUAL
                                                          _syncbn_torch_newest)
    set(${out} TRUE PARENT_SCOPE)
  else()
    set(${out} FALSE PARENT_SCOPE)
  endif()
endfunction()

# The torch folder of a Python. Does not import torch, which takes seconds.
function(_syncbn_torch_of_python python out)
  execute_process(
    COMMAND ${python} -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    WORKING_DIRECTORY /
    OUTPUT_VARIABLE folder ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(folder "")
  endif()
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()

function(_syncbn_find_torch out_root out_problem)
  set(${out_problem} "" PARENT_SCOPE)

  # 1. Named by the user.
  set(named ${Torch_ROOT} $ENV{Torch_ROOT})
  foreach(dir ${Torch_DIR} $ENV{Torch_DIR})
    list(APPEND named ${dir}/../../..)
  endforeach()
  foreach(folder IN LISTS named)
    _syncbn_torch_version(${folder} version)
    if(version)
      set(${out_root} ${folder} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  if(named)
    set(${out_problem} "Torch_ROOT or Torch_DIR names ${named}, where include/torch is not."
        PARENT_SCOPE)
    set(${out_root} "" PARENT_SCOPE)
    return()
  endif()
  string(REPLACE ":" ";" prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH prefixes)
    # torch.utils.cmake_prefix_path is share/cmake in the torch folder, hence ${prefix}/../..
    foreach(folder ${prefix} ${prefix}/torch ${prefix}/../..)
      _syncbn_torch_version(${folder} version)
      if(version)
        set(${out_root} ${folder} PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()

  # 2. and 3. Used before.
  foreach(folder IN LISTS SyncbnLibtorch_ROOT SyncbnLibtorch_HINTS)
    _syncbn_torch_version(${folder} version)
    if(version)
      set(${out_root} ${folder} PARENT_SCOPE)
      return()
    endif()
  endforeach()

  # 4. and 5. Installed in a Python.
  foreach(python ${Python_EXECUTABLE} python3 ${PROJECT_SOURCE_DIR}/.venv/bin/python3)
    _syncbn_torch_of_python(${python} folder)
    if(folder)
      _syncbn_torch_version(${folder} version)
      _syncbn_torch_supported("${version}" supported)
      if(supported)
        set(${out_root} ${folder} PARENT_SCOPE)
        return()
      endif()
      if(version)
        set(problem "${folder} is passed over: it is libtorch ${version}.")
        message(STATUS "${problem}")
        set(${out_problem} "${problem}" PARENT_SCOPE)
      endif()
    endif()
  endforeach()
  set(${out_root} "" PARENT_SCOPE)
endfunction()

_syncbn_find_torch(_syncbn_torch_root _syncbn_torch_problem)
if(_syncbn_torch_root)
  get_filename_component(_syncbn_torch_root ${_syncbn_torch_root} REALPATH)
endif()
set(SyncbnLibtorch_ROOT "${_syncbn_torch_root}" CACHE PATH "The folder of libtorch" FORCE)
mark_as_advanced(SyncbnLibtorch_ROOT)

set(SyncbnLibtorch_VERSION "")
if(SyncbnLibtorch_ROOT)
  _syncbn_torch_version(${SyncbnLibtorch_ROOT} SyncbnLibtorch_VERSION)
endif()

set(_syncbn_torch_library "")
if(EXISTS ${SyncbnLibtorch_ROOT}/lib/libtorch_cpu.so)
  set(_syncbn_torch_library ${SyncbnLibtorch_ROOT}/lib/libtorch_cpu.so)
elseif(SyncbnLibtorch_ROOT)
  set(_syncbn_torch_problem "${SyncbnLibtorch_ROOT}/lib/libtorch_cpu.so is missing.")
endif()
if(SyncbnLibtorch_VERSION AND SyncbnLibtorch_VERSION VERSION_LESS _syncbn_torch_oldest)
  set(_syncbn_torch_problem
      "${SyncbnLibtorch_ROOT} is libtorch ${SyncbnLibtorch_VERSION}, which is too old.")
  set(_syncbn_torch_library "")
endif()

if(SKBUILD AND NOT _syncbn_torch_problem)
  set(_syncbn_torch_problem "Run pip with --no-build-isolation: only then does the build see the installed torch.")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  SyncbnLibtorch
  REQUIRED_VARS _syncbn_torch_library SyncbnLibtorch_ROOT
  VERSION_VAR SyncbnLibtorch_VERSION
  REASON_FAILURE_MESSAGE
    "${_syncbn_torch_problem}\n  libtorch ${_syncbn_torch_oldest} to ${_syncbn_torch_newest} is needed. scripts/setup installs one into .venv. Or set Torch_ROOT to the folder of an installed torch.\n")

if(SyncbnLibtorch_FOUND AND NOT TARGET syncbn::libtorch)
  _syncbn_torch_supported(${SyncbnLibtorch_VERSION} _syncbn_torch_is_supported)
  if(NOT _syncbn_torch_is_supported)
    message(WARNING "libtorch ${SyncbnLibtorch_VERSION} is newer than ${_syncbn_torch_newest}, the "
                    "newest one this project was tested with: it may not compile.")
  endif()
  set(SyncbnLibtorch_HAS_CUDA FALSE)
  if(EXISTS ${SyncbnLibtorch_ROOT}/lib/libtorch_cuda.so)
    set(SyncbnLibtorch_HAS_CUDA TRUE)
  endif()

  # The wheel's include folder also holds the fmt that torch was built with, which would shadow the
  # fmt that spdlog and this project link. Hence a folder of links to everything else in it.
  set(_syncbn_torch_include ${CMAKE_BINARY_DIR}/libtorch-include)
  file(MAKE_DIRECTORY ${_syncbn_torch_include})
  file(GLOB _syncbn_torch_entries ${SyncbnLibtorch_ROOT}/include/*)
  list(REMOVE_ITEM _syncbn_torch_entries ${SyncbnLibtorch_ROOT}/include/fmt)
  foreach(_entry IN LISTS _syncbn_torch_entries)
    get_filename_component(_name ${_entry} NAME)
    file(CREATE_LINK ${_entry} ${_syncbn_torch_include}/${_name} SYMBOLIC)
  endforeach()

  add_library(syncbn::libtorch INTERFACE IMPORTED)
  # A program that also uses find_package(Torch) searches the whole include folder, but only after -I.
  if(TARGET fmt::fmt AND NOT syncbn_SOURCE_DIR STREQUAL CMAKE_SOURCE_DIR)
    get_target_property(_syncbn_fmt_dirs fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)
    foreach(_dir IN LISTS _syncbn_fmt_dirs)
      if(EXISTS ${_dir}/fmt/core.h)
        file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/fmt-include)
        file(CREATE_LINK ${_dir}/fmt ${CMAKE_BINARY_DIR}/fmt-include/fmt SYMBOLIC)
        target_compile_options(syncbn::libtorch INTERFACE -I${CMAKE_BINARY_DIR}/fmt-include)
      endif()
    endforeach()
  endif()
  target_include_directories(
    syncbn::libtorch SYSTEM INTERFACE ${_syncbn_torch_include}
                                      ${_syncbn_torch_include}/torch/csrc/api/include)
  target_link_libraries(syncbn::libtorch INTERFACE ${SyncbnLibtorch_ROOT}/lib/libtorch_cpu.so
                                                   ${SyncbnLibtorch_ROOT}/lib/libc10.so)
  # torch_cpu of a CUDA build needs libcudart and libcupti from NVIDIA's wheels beside it. At run time
  # its own RPATH finds them; the linker needs -rpath-link.
  file(GLOB _syncbn_torch_link_dirs ${SyncbnLibtorch_ROOT}/../nvidia/*/lib)
  foreach(_dir ${SyncbnLibtorch_ROOT}/lib ${_syncbn_torch_link_dirs})
    get_filename_component(_dir ${_dir} REALPATH)
    target_link_options(syncbn::libtorch INTERFACE -Wl,-rpath-link,${_dir})
  endforeach()
endif()
