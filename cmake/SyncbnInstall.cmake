# Installation, and the CMake package for other programs (find_package(syncbn CONFIG)).
#
# Components, from which packages are made: launcher, program (train), runtime (what train needs; the
# default, CMAKE_INSTALL_DEFAULT_COMPONENT_NAME), development (headers, static libraries), libtorch (the copy).
include(CMakePackageConfigHelpers)

get_property(_libraries GLOBAL PROPERTY SYNCBN_LIBRARIES)
get_property(_programs GLOBAL PROPERTY SYNCBN_PROGRAMS)
get_property(_header_dirs GLOBAL PROPERTY SYNCBN_HEADER_DIRS)
set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/syncbn)

# Where installed files, and programs built against them, look for libtorch. If libtorch lies in this
# clone or in the .venv that the clone links to, the installation gets a copy, so that it survives the
# clone: the headers and the libraries that CPU runs need, laid out as in the original.
set(_torch_rpath "")
if(SYNCBN_WITH_TORCH)
  set(_torch_hint ${SyncbnLibtorch_ROOT})
  set(_torch_in_clone FALSE)
  foreach(_folder ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/.venv ${PROJECT_BINARY_DIR})
    file(REAL_PATH ${_folder} _folder)
    cmake_path(IS_PREFIX _folder ${SyncbnLibtorch_ROOT} NORMALIZE _is_in_folder)
    if(_is_in_folder)
      set(_torch_in_clone TRUE)
    endif()
  endforeach()
  if(_torch_in_clone)
    set(_bundle_dir ${CMAKE_INSTALL_LIBDIR}/syncbn/libtorch)
    list(APPEND _torch_rpath $ORIGIN/../${_bundle_dir}/lib $ORIGIN/syncbn/libtorch/lib)
    # Relative to the package's folder, so that the installation can be moved.
    set(_torch_hint "\${CMAKE_CURRENT_LIST_DIR}/../../syncbn/libtorch")
    # torch_cpu finds the others in its own folder.
    file(GLOB _torch_runtime ${SyncbnLibtorch_ROOT}/lib/libtorch_cpu.so
         ${SyncbnLibtorch_ROOT}/lib/libc10.so ${SyncbnLibtorch_ROOT}/lib/libgomp*.so*
         ${SyncbnLibtorch_ROOT}/../nvidia/*/lib/libcudart.so.*
         ${SyncbnLibtorch_ROOT}/../nvidia/*/lib/libcupti.so.*)
    install(FILES ${_torch_runtime} DESTINATION ${_bundle_dir}/lib COMPONENT libtorch)
    install(
      DIRECTORY ${SyncbnLibtorch_ROOT}/include
      DESTINATION ${_bundle_dir}
      COMPONENT libtorch
      PATTERN include/fmt EXCLUDE)
    install(CODE "message(STATUS \"libtorch ${SyncbnLibtorch_VERSION} lies in the clone, so the installation gets a copy of its headers and CPU libraries (${_bundle_dir})\")"
            COMPONENT libtorch)
    if(SYNCBN_HAVE_CUDA)
      list(APPEND _torch_rpath ${SyncbnLibtorch_ROOT}/lib)
      install(CODE "message(WARNING \"GPU runs of the installed programs need ${SyncbnLibtorch_ROOT}, which lies in the clone: keep it, or configure with Torch_ROOT elsewhere\")"
              COMPONENT libtorch)
    endif()
  else()
    list(APPEND _torch_rpath ${SyncbnLibtorch_ROOT}/lib)
  endif()
endif()
set_target_properties(
  ${_libraries} ${_programs}
  PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${_torch_rpath}")
if(NOT BUILD_SHARED_LIBS)
  # The launcher starts faster if its RPATH has no libtorch folders. It needs only this folder, in which
  # fmt and spdlog may be installed.
  set_target_properties(syncbn-launch PROPERTIES INSTALL_RPATH
                                                 "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
endif()

# The Python package of the launcher consists of the component launcher (pyproject.toml).
install(TARGETS syncbn-launch RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT launcher)
list(REMOVE_ITEM _programs syncbn-launch)
if(_programs)
  install(TARGETS ${_programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
endif()
if(SYNCBN_WITH_TORCH)
  string(REPLACE "$ORIGIN/../" "$ORIGIN/../../" _libexec_rpath "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${_torch_rpath}")
  set_target_properties(train_program PROPERTIES INSTALL_RPATH "${_libexec_rpath}")
  install(TARGETS train_program RUNTIME DESTINATION libexec/syncbn COMPONENT program)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/configs/
        DESTINATION ${CMAKE_INSTALL_DATADIR}/syncbn/configs FILES_MATCHING PATTERN "*.yaml")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# Programs built against the package need the same third-party libraries. Fetched ones are not
# installed: with any of them, only programs can be installed.
set(SYNCBN_INSTALL_PACKAGE TRUE)
foreach(_dependency fmt::fmt spdlog::spdlog yaml-cpp::yaml-cpp
                    nlohmann_json::nlohmann_json ZLIB::ZLIB libdeflate::libdeflate)
  if(TARGET ${_dependency})
    get_target_property(_imported ${_dependency} IMPORTED)
    if(NOT _imported)
      set(SYNCBN_INSTALL_PACKAGE FALSE)
    endif()
  endif()
endforeach()
if(NOT SYNCBN_INSTALL_PACKAGE)
  message(STATUS "Installs programs only: the CMake package needs fmt, spdlog, yaml-cpp, "
                 "nlohmann-json, zlib and libdeflate to be installed, not fetched")
  install(
    TARGETS ${_libraries}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} EXCLUDE_FROM_ALL
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  return()
endif()

install(
  TARGETS ${_libraries}
  EXPORT syncbnTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
get_property(_written_header_dirs GLOBAL PROPERTY SYNCBN_WRITTEN_HEADER_DIRS)
foreach(_dir IN LISTS _header_dirs _written_header_dirs)
  install(DIRECTORY ${_dir}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
          FILES_MATCHING PATTERN "*.h")
endforeach()
install(EXPORT syncbnTargets NAMESPACE syncbn:: DESTINATION ${_package_dir} COMPONENT development)
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/syncbnConfig.cmake.in ${PROJECT_BINARY_DIR}/syncbnConfig.cmake
  INSTALL_DESTINATION ${_package_dir})
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/syncbnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/syncbnConfig.cmake ${PROJECT_BINARY_DIR}/syncbnConfigVersion.cmake
        ${PROJECT_SOURCE_DIR}/cmake/FindSyncbnLibtorch.cmake
        ${PROJECT_SOURCE_DIR}/cmake/Findlibdeflate.cmake
        ${PROJECT_SOURCE_DIR}/cmake/SyncbnPlugin.cmake
  DESTINATION ${_package_dir}
  COMPONENT development)
