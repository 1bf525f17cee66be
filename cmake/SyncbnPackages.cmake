# Debian packages, by cpack -G DEB (scripts/debs): syncbn-launch, syncbn and syncbn-dev.

# The user chooses where torch's wheel is installed: libexec/syncbn/train_program is a script that finds it.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torch_minor "${SyncbnLibtorch_VERSION}")
if(SYNCBN_WITH_TORCH)
  configure_file(${PROJECT_SOURCE_DIR}/packaging/debian/train_program.in ${PROJECT_BINARY_DIR}/debian/train_program @ONLY)
  install(TARGETS train RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT debian EXCLUDE_FROM_ALL)
  install(PROGRAMS $<TARGET_FILE:train_program> DESTINATION libexec/syncbn RENAME train_program.bin
          COMPONENT debian EXCLUDE_FROM_ALL)
  install(PROGRAMS ${PROJECT_BINARY_DIR}/debian/train_program DESTINATION libexec/syncbn
          COMPONENT debian EXCLUDE_FROM_ALL)
  # Removes the build machine's folders from RPATHs: the script tells the loader where libtorch is. The component
  # runtime, in the same package, is installed before this one.
  install(
    CODE [[
      set(prefix $ENV{DESTDIR}${CMAKE_INSTALL_PREFIX})
      file(GLOB_RECURSE files ${prefix}/libexec/syncbn/train_program.bin ${prefix}/lib/libsyncbn_*.so)
      foreach(file IN LISTS files)
        file(RPATH_REMOVE FILE ${file})
      endforeach()
    ]]
    COMPONENT debian EXCLUDE_FROM_ALL)
endif()
foreach(_package syncbn-launch syncbn syncbn-dev)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${_package}
          COMPONENT ${_package}_copyright EXCLUDE_FROM_ALL RENAME copyright)
endforeach()

set(CPACK_PACKAGE_NAME syncbn)
set(CPACK_PACKAGE_CONTACT "The syncbn authors <syncbn@localhost>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_COMPONENTS_ALL launcher syncbn-launch_copyright)
if(SYNCBN_WITH_TORCH)
  list(APPEND CPACK_COMPONENTS_ALL runtime debian syncbn_copyright)
  if(SYNCBN_INSTALL_PACKAGE)
    list(APPEND CPACK_COMPONENTS_ALL development syncbn-dev_copyright)
  endif()
endif()
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY} ${SyncbnLibtorch_ROOT}/lib)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_LAUNCH_PACKAGE_NAME syncbn-launch)
set(CPACK_DEBIAN_LAUNCH_DESCRIPTION
    "torchrun in C++\n Starts the processes of a distributed training job, on one machine or several,\n in milliseconds, and leaves none behind. Needs neither Python nor libtorch.")
set(CPACK_DEBIAN_LAUNCH_PACKAGE_RECOMMENDS libssl3) # loaded on demand: for a token
set(CPACK_DEBIAN_TRAIN_PACKAGE_NAME syncbn)
set(CPACK_DEBIAN_TRAIN_PACKAGE_DEPENDS "syncbn-launch (= ${PROJECT_VERSION}), libssl3") # loaded by ranks
set(CPACK_DEBIAN_TRAIN_DESCRIPTION
    "trains networks from one YAML file, with SyncBatchNorm and DDP\n The program train, and the library that it uses. Needs a torch ${_torch_minor} wheel,\n which it finds in the active Python environment or in SYNCBN_TORCH.")
set(CPACK_DEBIAN_DEV_PACKAGE_NAME syncbn-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS
    "syncbn (= ${PROJECT_VERSION}), libspdlog-dev, libfmt-dev, libyaml-cpp-dev, nlohmann-json3-dev, zlib1g-dev, libdeflate-dev, libjpeg-dev, libpng-dev")
set(CPACK_DEBIAN_DEV_DESCRIPTION
    "SyncBatchNorm, DDP and DistributedSampler for libtorch in C++\n Headers, libraries and the CMake package syncbn.")

include(CPack)
foreach(_group launch train dev)
  cpack_add_component_group(${_group})
endforeach()
cpack_add_component(launcher GROUP launch)
cpack_add_component(syncbn-launch_copyright GROUP launch)
cpack_add_component(runtime GROUP train)
cpack_add_component(debian GROUP train)
cpack_add_component(syncbn_copyright GROUP train)
cpack_add_component(development GROUP dev)
cpack_add_component(syncbn-dev_copyright GROUP dev)
