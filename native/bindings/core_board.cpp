// Python's view of the status board.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>
#include <tuple>

#include "core_bindings.h"
#include "pdx/board.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdx::bindings {
namespace {

Incarnation to_incarnation(const nb::bytes& value) {
  Incarnation incarnation;
  if (value.size() != incarnation.size()) throw nb::value_error("an incarnation has 16 bytes");
  std::memcpy(incarnation.data(), value.data(), incarnation.size());
  return incarnation;
}

nb::bytes to_bytes(const Incarnation& incarnation) {
  return nb::bytes(reinterpret_cast<const char*>(incarnation.data()), incarnation.size());
}

// Runs Python's signal handlers while a wait is interrupted; true ends the wait, so that the
// exception a handler raised (KeyboardInterrupt) reaches the caller.
bool signal_raised() {
  nb::gil_scoped_acquire held;
  return PyErr_CheckSignals() != 0;
}

std::uint64_t wait(const BoardReader& board, std::uint32_t slot, std::uint64_t seen,
                   double timeout_s) {
  if (!std::isfinite(timeout_s) || timeout_s < 0 || timeout_s > 1e9) {
    throw nb::value_error("timeout_s must be from 0 to 1e9 seconds");
  }
  std::uint64_t word = 0;
  {
    nb::gil_scoped_release released;
    word = board.wait(slot, seen, static_cast<std::int64_t>(timeout_s * 1e9), signal_raised);
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return word;
}

}  // namespace

void bind_board(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    }
  });
  m.def("board_bytes", &board_bytes, "slots"_a, "Bytes of a status board with this many slots.");

  nb::class_<BoardWriter>(m, "BoardWriter", "A status board mapped writable: the agent's side.")
      .def(
          "__init__",
          [](BoardWriter* self, int fd, std::uint32_t slots, const nb::bytes& incarnation) {
            new (self) BoardWriter(fd, slots, to_incarnation(incarnation));
          },
          "fd"_a, "slots"_a, "incarnation"_a)
      .def_prop_ro("slots", &BoardWriter::slots)
      .def(
          "set_details",
          [](BoardWriter& self, std::uint32_t slot, std::uint64_t room, std::uint64_t generation,
             const nb::bytes& peer, std::uint32_t peer_count, std::uint32_t lane) {
            self.set_details(slot, {room, generation, to_incarnation(peer), peer_count, lane});
          },
          "slot"_a, "room"_a, "generation"_a, "peer"_a, "peer_count"_a, "lane"_a)
      .def("set_bytes_done", &BoardWriter::set_bytes_done, "slot"_a, "bytes_done"_a)
      .def("set_returned", &BoardWriter::set_returned, "slot"_a, "packed"_a)
      .def("end", &BoardWriter::end, "Tell readers that this agent writes no more. Idempotent.")
      .def("publish", &BoardWriter::publish, "slot"_a, "sequence"_a, "state"_a,
           "Store the word (release) and wake its waiters.");

  nb::class_<BoardReader>(m, "BoardReader", "A status board mapped read-only: the worker's side.")
      .def(nb::init<int, std::uint32_t>(), "fd"_a, "slots"_a)
      .def_prop_ro("slots", &BoardReader::slots)
      .def_prop_ro("incarnation",
                   [](const BoardReader& self) { return to_bytes(self.incarnation()); })
      .def_prop_ro("ended", &BoardReader::ended,
                   "Whether the agent has ended, or its thread: one memory read.")
      .def("word", &BoardReader::word, "slot"_a,
           "`sequence << 8 | state` of a slot (acquire); with bit 7 once the agent has ended.")
      .def("bytes_done", &BoardReader::bytes_done, "slot"_a)
      .def("returned", &BoardReader::returned, "slot"_a)
      .def(
          "details",
          [](const BoardReader& self, std::uint32_t slot) {
            const BoardDetails details = self.details(slot);
            return std::make_tuple(details.room, details.generation, to_bytes(details.peer),
                                   details.peer_count, details.lane);
          },
          "slot"_a, "(room, generation, peer incarnation, peer count, lane code) of a slot.")
      .def("wait", &wait, "slot"_a, "seen"_a, "timeout_s"_a,
           "Block, without the GIL, until the slot's word is not `seen` or the time is over; "
           "returns the word.");
}

}  // namespace pdx::bindings
