// The extension pdxfer._core: planning and the status board. No UCX.
#include <nanobind/nanobind.h>

#include "core_bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "Native core of pdxfer: plans and the status board.";
  pdx::bindings::bind_plan(m);
  pdx::bindings::bind_board(m);
}
