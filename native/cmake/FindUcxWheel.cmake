# The UCX to build against: UCX_ROOT if given, else the libucx wheel of the building Python, else the
# system's. Only headers and link names matter here; the library used at run time is loaded by
# pdxfer.fabric.ucx_loader.
if(NOT DEFINED ucx_DIR AND NOT DEFINED UCX_ROOT)
  find_package(Python 3.11 COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
              "import importlib.util as u; s=u.find_spec('libucx'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _libucx OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(_libucx)
      set(_ucx_hint ${_libucx}/lib/cmake/ucx)
    endif()
  endif()
endif()
find_package(ucx CONFIG REQUIRED HINTS ${_ucx_hint} ${UCX_ROOT})
