#include "pdx/ucx/progress.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <utility>

#include "pdx/ucx/status.h"

namespace pdx::ucx {
namespace {

// Deadlines and UCX's own keepalive are looked at this often while nothing happens.
constexpr int kSleepMs = 100;
// While one worker spins, the descriptors of the sleeping ones are looked at every so many turns.
constexpr std::uint64_t kPollTurns = 16;

}  // namespace

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

std::uint64_t after_ns(double seconds) {
  const double bounded = std::clamp(seconds, 0.0, 1e6);
  return now_ns() + static_cast<std::uint64_t>(bounded * 1e9);
}

Progress::Progress(EngineOptions options)
    : options_(std::move(options)), epoll_(epoll_create1(EPOLL_CLOEXEC)), probe_target_(64, '\0') {
  if (epoll_ < 0) {
    throw ResourceError("epoll: no descriptor left; raise RLIMIT_NOFILE");
  }
}

Progress::~Progress() { ::close(epoll_); }

void Progress::start() {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, commands_.fileno(), &event) != 0) {
    throw ResourceError("epoll: cannot listen for commands");
  }
  context_ = std::make_shared<const Context>(options_.lane);
  probe_ = std::make_unique<Region>(
      context_, Range{reinterpret_cast<std::uint64_t>(probe_target_.data()), probe_target_.size()});
  sender_ = std::make_unique<SendWorker>(*context_, commands_, completions_, options_.window,
                                         probe_->rkey());
  listen(sender_->worker());
}

void Progress::run(const std::function<void(const std::exception_ptr&)>& started) {
  try {
    start();
  } catch (...) {
    commands_.stop();
    shut_down();
    started(std::current_exception());
    return;
  }
  started(nullptr);
  while (!stopped_) {
    turn();
  }
  // Calls that were taken a moment ago still wait for their answer.
  commands_.stop();
  run_commands();
  shut_down();
}

void Progress::turn() {
  ++turns_;
  bool active = run_commands();
  active = sender_->pump() || active;
  const std::uint64_t now = now_ns();
  if (active) {
    sender_->worker().wake(now);
  }
  active = progress_workers(now) || active;
  housekeep(now);
  if (stopping_) {
    stop_step(now);
  }
  if (!active && sleep_allowed()) {
    if (commands_.sleep()) {
      wait_for_events(kSleepMs);
    }
    commands_.awake();
  } else if (turns_ % kPollTurns == 0) {
    wait_for_events(0);
  }
}

bool Progress::run_commands() {
  auto commands = commands_.take();
  for (const auto& command : commands) {
    command();
  }
  return !commands.empty();
}

bool Progress::progress_worker(Worker& worker, std::uint64_t now) {
  if (worker.armed) {
    return false;
  }
  if (worker.progress()) {
    worker.last_event_ns = now;
    return true;
  }
  if (now - worker.last_event_ns > static_cast<std::uint64_t>(options_.spin_us * 1000.0)) {
    worker.arm();
  }
  return false;
}

bool Progress::progress_workers(std::uint64_t now) {
  bool active = progress_worker(sender_->worker(), now);
  for (const auto& [id, receiver] : receivers_) {
    active = progress_worker(receiver->worker(), now) || active;
  }
  return active;
}

void Progress::housekeep(std::uint64_t now) {
  sender_->housekeep(now, turns_);
  lose_senders(now);
  for (const std::uint64_t id : regions_.release_unused()) {
    completions_.push({.event = Event::RegionReleased, .id = id, .data = {}, .error = {}});
  }
}

void Progress::lose_senders(std::uint64_t now) {
  for (auto at = receivers_.begin(); at != receivers_.end();) {
    at->second->housekeep(now);
    if (at->second->lost().empty()) {
      ++at;
      continue;
    }
    // First the worker, then the word: whoever reads SenderLost knows that the worker is gone.
    const std::uint64_t id = at->first;
    std::string reason = at->second->lost();
    unlisten(at->second->worker());
    at = receivers_.erase(at);
    completions_.push(
        {.event = Event::SenderLost, .id = id, .data = {}, .error = std::move(reason)});
  }
}

bool Progress::sleep_allowed() const {
  if (forced_ || sender_->settling() || !sender_->worker().armed) {
    return false;
  }
  return std::all_of(receivers_.begin(), receivers_.end(),
                     [](const auto& entry) { return entry.second->worker().armed; });
}

void Progress::wait_for_events(int timeout_ms) {
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
    // UCX checks its keepalive while it is progressed.
    sender_->worker().wake(now - static_cast<std::uint64_t>(options_.spin_us * 1000.0));
    for (const auto& [id, receiver] : receivers_) {
      receiver->worker().wake(now - static_cast<std::uint64_t>(options_.spin_us * 1000.0));
    }
  }
}

void Progress::listen(Worker& worker) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &worker;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, worker.fileno(), &event) != 0) {
    throw ResourceError("epoll: cannot listen to a UCX worker");
  }
  worker.wake(now_ns());
}

void Progress::unlisten(Worker& worker) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, worker.fileno(), nullptr);
}

std::string Progress::open_receiver(std::uint64_t id) {
  auto receiver = std::make_unique<ReceiveWorker>(id, *context_, completions_,
                                                  ReceiveWorker::Limits{options_.commit_bytes_max});
  listen(receiver->worker());
  LaneAddress address;
  address.ucx_major = context_->runtime().major;
  address.ucx_minor = context_->runtime().minor;
  address.worker = receiver->worker().address();
  address.probe = {probe_->range(), probe_->rkey()};
  receivers_.emplace(id, std::move(receiver));
  return address.pack();
}

void Progress::watch_sender(std::uint64_t id, const std::string& address) {
  const auto at = receivers_.find(id);
  if (at != receivers_.end()) {
    at->second->expect(address, after_ns(options_.watch_timeout_s));
  }
}

void Progress::close_receiver(std::uint64_t id) {
  const auto at = receivers_.find(id);
  if (at != receivers_.end()) {
    unlisten(at->second->worker());
    receivers_.erase(at);
  }
}

void Progress::begin_stop(std::uint64_t drain_deadline_ns) {
  stopping_ = true;
  drain_deadline_ns_ = drain_deadline_ns;
  sender_->drop_all("the engine is closing");
}

void Progress::stop_step(std::uint64_t now) {
  if (!forced_ && (!sender_->busy() || now > drain_deadline_ns_)) {
    forced_ = true;
  }
  if (forced_) {
    sender_->close_all("the engine is closed");
  }
  stopped_ = forced_ && sender_->empty();
}

// Rkeys and endpoints are gone; then workers, registrations, context. A post that is still being
// built keeps its regions, and they the context.
void Progress::shut_down() noexcept {
  receivers_.clear();
  sender_.reset();
  regions_.clear();
  probe_.reset();
  context_.reset();
}

}  // namespace pdx::ucx
