#include "pdx/ucx/worker_set.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "pdx/ucx/clock.h"
#include "pdx/ucx/status.h"
#include "pdx/ucx/worker.h"

namespace pdx::ucx {
namespace {

bool listen(int epoll, int fd, void* worker) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = worker;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

WorkerSet::WorkerSet(int command_fd, double spin_us)
    : spin_ns_(static_cast<std::uint64_t>(spin_us * 1000.0)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) {
    throw ResourceError("epoll: no descriptor left; raise RLIMIT_NOFILE");
  }
  if (!listen(epoll_, command_fd, nullptr)) {
    ::close(epoll_);
    throw ResourceError("epoll: cannot listen for commands");
  }
}

WorkerSet::~WorkerSet() { ::close(epoll_); }

void WorkerSet::add(Worker& worker) {
  if (!listen(epoll_, worker.fileno(), &worker)) {
    throw ResourceError("epoll: cannot listen to a UCX worker");
  }
  workers_.push_back(&worker);
  worker.wake(now_ns());
}

void WorkerSet::remove(Worker& worker) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, worker.fileno(), nullptr);
  std::erase(workers_, &worker);
}

bool WorkerSet::progress(Worker& worker, std::uint64_t now_ns) const {
  if (worker.armed) {
    return false;
  }
  if (worker.progress()) {
    worker.last_event_ns = now_ns;
    return true;
  }
  // An event may have been later than the start of this turn.
  if (now_ns > worker.last_event_ns + spin_ns_) {
    worker.arm();
  }
  return false;
}

bool WorkerSet::progress(std::uint64_t now_ns) {
  bool active = false;
  for (Worker* worker : workers_) {
    active = progress(*worker, now_ns) || active;
  }
  return active;
}

bool WorkerSet::armed() const {
  return std::all_of(workers_.begin(), workers_.end(),
                     [](const Worker* worker) { return worker->armed; });
}

void WorkerSet::wait(int timeout_ms) {
  std::array<epoll_event, 16> events{};
  const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout_ms);
  const std::uint64_t now = now_ns();
  for (int i = 0; i < count; ++i) {
    auto* worker = static_cast<Worker*>(events[static_cast<std::size_t>(i)].data.ptr);
    if (worker != nullptr) {
      worker->wake(now);
    }
  }
  if (count == 0 && timeout_ms > 0) {
    // UCX checks its keepalive while it is progressed: once, without spinning.
    for (Worker* worker : workers_) {
      worker->wake(now - spin_ns_);
    }
  }
}

}  // namespace pdx::ucx
