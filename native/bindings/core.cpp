// The extension pdxfer._core: planning, the status board, the local socket. No UCX.
#include <nanobind/nanobind.h>

#include "core_bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "Native core of pdxfer: plans, the status board, calls on the local socket.";
  pdx::bindings::bind_plan(m);
  pdx::bindings::bind_board(m);
  pdx::bindings::bind_socket(m);
}
