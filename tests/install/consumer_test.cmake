# Installs this build, moves the installation, builds the examples against it with nothing else said,
# and runs them on two ranks by the installed launcher.
file(REMOVE_RECURSE ${WORK})

function(run)
  list(JOIN ARGN " " line)
  message(STATUS "${line}")
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
                                                         ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "exit code ${status}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect text)
  if(NOT output MATCHES "${text}")
    message(FATAL_ERROR "\"${text}\" is not in:\n${output}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/prefix)
foreach(page man/man1/syncbn-launch.1 bash-completion/completions/syncbn-launch
             zsh/site-functions/_syncbn-launch)
  file(SIZE ${WORK}/prefix/share/${page} size)
  if(size EQUAL 0)
    message(FATAL_ERROR "${page} is empty")
  endif()
endforeach()

foreach(example consumer buffer_broadcast)
  run(
    ${CMAKE_COMMAND} -S ${SOURCE}/examples/${example} -B ${WORK}/${example} -G ${GENERATOR}
    -D CMAKE_PREFIX_PATH=${WORK}/prefix -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_COMPILER=${CXX})
  run(${CMAKE_COMMAND} --build ${WORK}/${example})
endforeach()

set(ENV{OMP_NUM_THREADS} 1)
run(${WORK}/prefix/bin/syncbn-launch --standalone --nproc_per_node=2 ${WORK}/consumer/two_moons)
expect("rank 0 of 2: [0-9]+ of 512 points right")
expect("rank 1 of 2: [0-9]+ of 512 points right")
run(${WORK}/prefix/bin/syncbn-launch --standalone --nproc_per_node=2 ${WORK}/buffer_broadcast/buffer_broadcast)
expect("an unused forward before the backward: works")

run(${WORK}/prefix/bin/train --help)
file(REMOVE_RECURSE ${WORK})
