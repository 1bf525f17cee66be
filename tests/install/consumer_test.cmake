# Installs this build, moves the installation, builds the examples against it without further options, and runs them on
# two ranks with the installed launcher, where the clone is hidden. TEST selects the examples.

# Outside of the clone and its build folder, which are hidden below.
execute_process(COMMAND mktemp -d --tmpdir syncbn-install-XXXXXX OUTPUT_VARIABLE WORK
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

function(fail text)
  file(REMOVE_RECURSE ${WORK})
  message(FATAL_ERROR "${text}")
endfunction()

function(run)
  list(JOIN ARGN " " line)
  string(REPLACE "${hide}" "…" line "${line}")
  message(STATUS "${line}")
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${WORK} RESULT_VARIABLE status
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    fail("exit code ${status}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect text)
  if(NOT output MATCHES "${text}")
    fail("\"${text}\" is not in:\n${output}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/prefix)
set(pages bash-completion/completions/syncbn-launch zsh/site-functions/_syncbn-launch)
if(HELP2MAN)
  list(APPEND pages man/man1/syncbn-launch.1)
endif()
foreach(page IN LISTS pages)
  file(SIZE ${WORK}/prefix/share/${page} size)
  if(size EQUAL 0)
    fail("${page} is empty")
  endif()
endforeach()

# Other processes of this machine may need the clone, so it is hidden only from this test.
set(hidden ${SOURCE} ${BUILD})
if(EXISTS ${SOURCE}/.venv)
  file(REAL_PATH ${SOURCE}/.venv venv)
  list(APPEND hidden ${venv})
endif()
set(hide "set -e\n")
foreach(folder IN LISTS hidden)
  # The second folder may be inside the first one.
  string(APPEND hide "[ ! -d '${folder}' ] || mount -t tmpfs none '${folder}'\n")
endforeach()
set(without_clone unshare --user --map-root-user --mount sh -c "${hide}exec \"$@\"" sh)
execute_process(COMMAND ${without_clone} true RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
if(NOT status EQUAL 0)
  message(STATUS "the clone stays visible: this machine has no user namespaces")
  set(without_clone env)
endif()

file(COPY ${SOURCE}/examples DESTINATION ${WORK})
# Like find_package(Torch), which a program may also call: its include folder has another fmt than spdlog's.
if(EXISTS ${TORCH}/include/fmt)
  file(COPY ${TORCH}/include/fmt DESTINATION ${WORK}/torch)
  file(APPEND ${WORK}/examples/consumer/CMakeLists.txt
       "target_include_directories(two_moons SYSTEM BEFORE PRIVATE ${WORK}/torch)\n")
endif()
# Of own_experiment, the short test builds the plug-in.
set(target_of_own_experiment --target own_experiment)
set(examples consumer own_experiment)
if(TEST MATCHES EveryExample)
  set(target_of_own_experiment "")
  list(APPEND examples buffer_broadcast model_parallel ring_all_reduce)
endif()
foreach(example IN LISTS examples)
  run(${without_clone}
    ${CMAKE_COMMAND} -S ${WORK}/examples/${example} -B ${WORK}/${example} -G ${GENERATOR}
    -D CMAKE_PREFIX_PATH=${WORK}/prefix -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_COMPILER=${CXX})
  run(${without_clone} ${CMAKE_COMMAND} --build ${WORK}/${example} ${target_of_${example}})
endforeach()

# syncbn::dist alone needs none of the other targets' packages.
set(absent CLI11 JPEG libdeflate nlohmann_json PNG yaml-cpp ZLIB)
list(TRANSFORM absent REPLACE "(.+)" "-DCMAKE_DISABLE_FIND_PACKAGE_\\1=TRUE")
run(${without_clone}
  ${CMAKE_COMMAND} -S ${WORK}/examples/ring_all_reduce -B ${WORK}/dist_alone -G ${GENERATOR}
  -D CMAKE_PREFIX_PATH=${WORK}/prefix -D CMAKE_CXX_COMPILER=${CXX} ${absent})

foreach(file bin/train libexec/syncbn/train_program lib/libsyncbn_dist.so ../consumer/two_moons)
  run(${without_clone} ldd ${WORK}/prefix/${file})
  foreach(folder IN LISTS hidden)
    string(FIND "${output}" ${folder}/ place)
    if(output MATCHES "not found" OR NOT place EQUAL -1)
      fail("${file} needs the clone:\n${output}")
    endif()
  endforeach()
endforeach()

set(ENV{OMP_NUM_THREADS} 1)
set(launch ${without_clone} ${WORK}/prefix/bin/syncbn-launch --standalone --nproc_per_node=2)
run(${launch} ${WORK}/consumer/two_moons)
expect("rank 0 of 2: [0-9]+ of 512 points right")
expect("rank 1 of 2: [0-9]+ of 512 points right")
# With a file, the program saves each epoch in it, and begins with its state.
foreach(time first second)
  run(${launch} ${WORK}/consumer/two_moons ${WORK}/moons.pt)
  expect("rank 1 of 2: [0-9]+ of 512 points right")
  if(NOT EXISTS ${WORK}/moons.pt)
    fail("two_moons FILE has not written its file")
  endif()
endforeach()
run(${launch} ${WORK}/prefix/bin/train --config ${WORK}/prefix/share/syncbn/configs/digits.yaml
    --epochs 1)
expect("test accuracy")
set(own ${WORK}/own_experiment)
set(plugin --plugins=[${own}/libown_experiment.so])
run(${without_clone} ${WORK}/prefix/bin/train --list metrics ${plugin})
expect("off_by .*libown_experiment.so.*distance integer .*default 1")
if(NOT TEST MATCHES EveryExample)
  file(REMOVE_RECURSE ${WORK})
  return()
endif()

run(${launch} ${WORK}/buffer_broadcast/buffer_broadcast)
expect("an unused forward before the backward: works")
run(${launch} ${WORK}/ring_all_reduce/ring_all_reduce)
expect("sum over 2 ranks: 6 8 10 12, as by dist::all_reduce")

# A custom network, data set and metric, as a plug-in and in a program.
set(dots --config ${WORK}/examples/own_experiment/dots.yaml --data.size=400)
run(${launch} ${WORK}/prefix/bin/train ${dots} ${plugin} --run_dir ${WORK}/by_plugin)
expect("dots: 400 training and 400 test samples, 2 ranks")
run(${launch} ${own}/own_trainer ${dots} --run_dir ${WORK}/by_own_main)
foreach(run by_plugin by_own_main)
  file(STRINGS ${WORK}/${run}/metrics.csv header LIMIT_COUNT 1)
  if(NOT header MATCHES "test_off_by_1")
    fail("the metric is not in ${run}/metrics.csv: ${header}")
  endif()
endforeach()
run(${without_clone} ${WORK}/prefix/bin/train eval --config ${WORK}/by_plugin)
expect("\"off_by_1\":")
run(${without_clone} ${own}/own_trainer --list models)
expect("counter .*width integer .*default 16")

file(REMOVE_RECURSE ${WORK})
