# Tests of the UCX data plane. They run with the UCX that was built against.
get_target_property(_pdx_ucp ucx::ucp IMPORTED_LOCATION)
get_filename_component(_pdx_ucx_lib ${_pdx_ucp} DIRECTORY)

set(_pdx_ucx_environment
    "LD_LIBRARY_PATH=${_pdx_ucx_lib}:$ENV{LD_LIBRARY_PATH}"
    "UCX_LOG_FILE=stderr"
    "TSAN_OPTIONS=suppressions=${CMAKE_CURRENT_SOURCE_DIR}/tsan.supp"
    "LSAN_OPTIONS=suppressions=${CMAKE_CURRENT_SOURCE_DIR}/lsan.supp"
    # A UCX that patches malloc and mmap under a sanitizer's feet is not what is tested here.
    "UCX_MEM_EVENTS=n")

function(pdx_ucx_executable name)
  add_executable(${name} ${name}.cpp)
  target_link_libraries(${name} PRIVATE pdx_ucx pdx_options)
  if(PDX_SANITIZE)
    target_sources(${name} PRIVATE ucx_unchecked_calls.cpp)
    set_target_properties(${name} PROPERTIES ENABLE_EXPORTS ON)
  endif()
endfunction()

function(pdx_ucx_test name executable)
  add_test(NAME ${name} COMMAND ${executable} ${ARGN})
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${_pdx_ucx_environment}" TIMEOUT 120)
endfunction()

pdx_ucx_executable(test_ucx_parts)
pdx_ucx_executable(test_ucx_addresses)
pdx_ucx_executable(test_ucx_loopback)
pdx_ucx_executable(test_ucx_ends)
pdx_ucx_executable(test_ucx_processes)
pdx_ucx_test(ucx_parts test_ucx_parts)
pdx_ucx_test(ucx_addresses_tcp test_ucx_addresses tcp)
pdx_ucx_test(ucx_addresses_cma test_ucx_addresses cma)
pdx_ucx_test(ucx_loopback_tcp test_ucx_loopback tcp)
pdx_ucx_test(ucx_loopback_cma test_ucx_loopback cma)
pdx_ucx_test(ucx_ends_tcp test_ucx_ends tcp)
pdx_ucx_test(ucx_ends_cma test_ucx_ends cma)
pdx_ucx_test(ucx_processes_tcp test_ucx_processes tcp)
pdx_ucx_test(ucx_processes_cma test_ucx_processes cma)
