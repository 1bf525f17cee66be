# syncbn_add_plugin(<name> SOURCES ... [LINK ...]) makes lib<name>.so, which `plugins: [lib<name>.so]` of
# train's configuration loads.
#
# It links libtorch, and none of syncbn's libraries: the program that loads it has these, with the one
# registry of networks, of data sets, and so on, and gives the plug-in its symbols.
function(syncbn_add_plugin name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(${name} MODULE ${ARG_SOURCES})
  target_compile_features(${name} PRIVATE cxx_std_20)
  foreach(usage INCLUDE_DIRECTORIES COMPILE_DEFINITIONS)
    set_property(TARGET ${name} APPEND
                 PROPERTY ${usage} $<TARGET_PROPERTY:syncbn::train,INTERFACE_${usage}>)
  endforeach()
  if(TARGET syncbn_revision) # in syncbn's own build, which writes a header of the plug-in's
    add_dependencies(${name} syncbn_revision)
  endif()
  # Two plug-ins may have classes of the same name: each keeps its own static variables of templates.
  target_compile_options(${name} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
  target_link_libraries(${name} PRIVATE syncbn::libtorch fmt::fmt spdlog::spdlog ${ARG_LINK})
endfunction()
