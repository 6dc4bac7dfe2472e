// The extension pdxfer.bench._pieces: what the bench compares with.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cerrno>
#include <span>
#include <system_error>

#include "pdx/pieces.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pdx::bench;

namespace {

using RunArray = nb::ndarray<const std::int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using BaseArray = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Runs to_runs(const RunArray& runs) {
  static_assert(sizeof(Run) == 5 * sizeof(std::int64_t));
  return {reinterpret_cast<const Run*>(runs.data()), runs.shape(0)};
}

Bases to_bases(const BaseArray& bases) { return {bases.data(), bases.shape(0)}; }

// A region index is used as it is in C++: one that is out of range has to end here.
void check(Runs runs, std::size_t source_regions, std::size_t destination_regions) {
  const auto inside = [](std::int64_t region, std::size_t count) {
    return region >= 0 && static_cast<std::size_t>(region) < count;
  };
  for (const Run& run : runs) {
    if (!inside(run.source_region, source_regions) ||
        !inside(run.destination_region, destination_regions)) {
      throw nb::value_error("a run names a region that is not there");
    }
  }
}

}  // namespace

NB_MODULE(_pieces, m) {
  m.doc() = "Runs moved by memcpy, process_vm_writev and plain sockets.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    }
  });
  m.def(
      "copy_runs",
      [](const RunArray& runs, const BaseArray& source, const BaseArray& destination) {
        check(to_runs(runs), source.shape(0), destination.shape(0));
        nb::gil_scoped_release released;
        copy_runs(to_runs(runs), to_bases(source), to_bases(destination));
      },
      "runs"_a, "source"_a, "destination"_a, "memcpy, one call a run.");
  m.def(
      "vm_write_runs",
      [](int pid, const RunArray& runs, const BaseArray& source, const BaseArray& destination) {
        check(to_runs(runs), source.shape(0), destination.shape(0));
        nb::gil_scoped_release released;
        vm_write_runs(pid, to_runs(runs), to_bases(source), to_bases(destination));
      },
      "pid"_a, "runs"_a, "source"_a, "destination"_a,
      "process_vm_writev, one call a run, into process `pid`.");
  m.def(
      "send_runs",
      [](int socket, const RunArray& runs, const BaseArray& source) {
        check(to_runs(runs), source.shape(0), SIZE_MAX);
        nb::gil_scoped_release released;
        send_runs(socket, to_runs(runs), to_bases(source));
      },
      "socket"_a, "runs"_a, "source"_a, "The bytes of the runs into a blocking socket.");
  m.def(
      "receive_runs",
      [](int socket, const RunArray& runs, const BaseArray& destination) {
        check(to_runs(runs), SIZE_MAX, destination.shape(0));
        nb::gil_scoped_release released;
        receive_runs(socket, to_runs(runs), to_bases(destination));
      },
      "socket"_a, "runs"_a, "destination"_a, "The bytes of a blocking socket into place.");
  m.def(
      "first_difference",
      [](const RunArray& runs, const BaseArray& source, const BaseArray& destination) {
        check(to_runs(runs), source.shape(0), destination.shape(0));
        nb::gil_scoped_release released;
        return first_difference(to_runs(runs), to_bases(source), to_bases(destination));
      },
      "runs"_a, "source"_a, "destination"_a,
      "The first run whose bytes differ between the two sides, or -1.");
}
