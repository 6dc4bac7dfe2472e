#include "pdx/ucx/progress.h"

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

Progress::Progress(EngineOptions options)
    : options_(std::move(options)),
      workers_(commands_.fileno(), options_.spin_us),
      probe_target_(64, '\0') {}

void Progress::start() {
  context_ = std::make_shared<const Context>(options_.lane);
  probe_ = std::make_unique<Region>(
      context_, Range{reinterpret_cast<std::uint64_t>(probe_target_.data()), probe_target_.size()});
  paths_ = std::make_unique<SendPaths>(*context_, workers_, commands_, completions_,
                                       options_.window, probe_->rkey());
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
  active = paths_->pump() || active;
  const std::uint64_t now = now_ns();
  active = workers_.progress(now) || active;
  housekeep(now);
  if (stopping_) {
    stop_step(now);
  }
  if (!active && sleep_allowed()) {
    if (commands_.sleep()) {
      workers_.wait(kSleepMs);
    }
    commands_.awake();
  } else if (turns_ % kPollTurns == 0) {
    workers_.wait(0);
  }
}

bool Progress::run_commands() {
  auto commands = commands_.take();
  for (const auto& command : commands) {
    command();
  }
  return !commands.empty();
}

void Progress::housekeep(std::uint64_t now) {
  paths_->housekeep(now, turns_);
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
    at = receivers_.erase(at);
    completions_.push(
        {.event = Event::SenderLost, .id = id, .data = {}, .error = std::move(reason)});
  }
}

bool Progress::sleep_allowed() const { return !forced_ && !paths_->settling() && workers_.armed(); }

std::string Progress::open_receiver(std::uint64_t id) {
  auto receiver = std::make_unique<ReceiveWorker>(id, *context_, workers_, completions_,
                                                  ReceiveWorker::Limits{options_.commit_bytes_max});
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

void Progress::close_receiver(std::uint64_t id) { receivers_.erase(id); }

void Progress::begin_stop(std::uint64_t drain_deadline_ns) {
  stopping_ = true;
  drain_deadline_ns_ = drain_deadline_ns;
  paths_->drop_all("the engine is closing");
}

void Progress::stop_step(std::uint64_t now) {
  if (!forced_ && (!paths_->busy() || now > drain_deadline_ns_)) {
    forced_ = true;
  }
  if (forced_) {
    paths_->close_all("the engine is closed");
  }
  stopped_ = forced_ && paths_->empty();
}

// Rkeys and endpoints are gone; then workers, registrations, context. A post that is still being
// built keeps its regions, and they the context.
void Progress::shut_down() noexcept {
  receivers_.clear();
  paths_.reset();
  regions_.clear();
  probe_.reset();
  context_.reset();
}

}  // namespace pdx::ucx
