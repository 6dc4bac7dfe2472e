#include "pdx/ucx/command_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "pdx/ucx/status.h"

namespace pdx::ucx {

CommandQueue::CommandQueue() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) {
    throw ResourceError("eventfd for commands: no descriptor left; raise RLIMIT_NOFILE");
  }
}

CommandQueue::~CommandQueue() { ::close(fd_); }

bool CommandQueue::push_locked(Command command) {
  if (stopped_) {
    return false;
  }
  commands_.push_back(std::move(command));
  if (asleep_.exchange(false)) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);
  }
  return true;
}

bool CommandQueue::push(Command command) {
  const std::lock_guard lock(mutex_);
  return push_locked(std::move(command));
}

bool CommandQueue::push_for_path(std::uint64_t path, Command command) {
  const std::lock_guard lock(mutex_);
  return open_paths_.contains(path) && push_locked(std::move(command));
}

void CommandQueue::open_gate(std::uint64_t path) {
  const std::lock_guard lock(mutex_);
  open_paths_.insert(path);
}

void CommandQueue::close_gate(std::uint64_t path) {
  const std::lock_guard lock(mutex_);
  open_paths_.erase(path);
}

void CommandQueue::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  open_paths_.clear();
}

std::deque<CommandQueue::Command> CommandQueue::take() {
  std::deque<Command> taken;
  const std::lock_guard lock(mutex_);
  taken.swap(commands_);
  return taken;
}

bool CommandQueue::sleep() {
  asleep_.store(true);
  const std::lock_guard lock(mutex_);
  if (commands_.empty()) {
    return true;
  }
  asleep_.store(false);
  return false;
}

void CommandQueue::awake() {
  asleep_.store(false);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(fd_, &count, sizeof count);
}

}  // namespace pdx::ucx
