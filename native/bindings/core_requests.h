// Requests as Python gives them: mappings from group to pages and to token ranges.
#pragma once
#include <Python.h>
#include <nanobind/nanobind.h>

#include <deque>
#include <vector>

#include "pdx/plan.h"

namespace pdx::bindings {

// The requests of one call, read without a copy: ids are borrowed from their arrays until this
// goes. Made and destroyed under the GIL; `requests` may be used without it.
class ReadRequests {
 public:
  // `ranges`: dict from group name to (first, end); `source` and `destination`: mappings from group
  // name to an object with `ids` (int64 [pages]) and `first_token`. Groups of `ranges` that the
  // plan lacks throw too. Throws std::invalid_argument; Python then finds out what to say.
  ReadRequests(const Plan& plan, nanobind::handle ranges, nanobind::handle source,
               nanobind::handle destination);
  ReadRequests(const ReadRequests&) = delete;
  ReadRequests& operator=(const ReadRequests&) = delete;

  const std::vector<GroupRequest>& requests() const { return requests_; }

 private:
  // A borrowed buffer, given back with it: also when the constructor throws.
  struct View {
    View() = default;
    ~View() { PyBuffer_Release(&buffer); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    Py_buffer buffer{};
  };

  PageList pages_of(PyObject* mapping, PyObject* name);

  std::vector<GroupRequest> requests_;
  std::deque<View> views_;  // never moved: a buffer's shape points into it
};

}  // namespace pdx::bindings
