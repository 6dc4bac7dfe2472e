// What one transfer has queued and in flight on one endpoint.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "pdx/ucx/batch.h"

namespace pdx::ucx {

class SendEndpoint;

// A commit waits until no batch of its generation is unfinished.
struct Commit {
  std::uint64_t ticket = 0;
  // Kept until UCX has sent it.
  std::string payload;
  Generation* generation = nullptr;
  bool sent = false;
  bool finished = false;
};

// Threads: the progress thread only.
class Generation {
 public:
  Generation(std::uint64_t number, SendEndpoint& owner) : id(number), endpoint(owner) {}

  // The first batch with something to post; nullptr: none.
  Batch* next_unposted();
  // Nothing is queued, in flight or waiting to be told.
  bool idle() const;
  bool commits_finished() const;
  // Frees what was reported.
  void sweep();

  const std::uint64_t id;
  SendEndpoint& endpoint;
  std::deque<std::unique_ptr<Batch>> batches;
  std::deque<std::unique_ptr<Commit>> commits;
  // Batches not finished.
  std::size_t outstanding = 0;
  // First error of any batch; later ones of this generation end with it.
  std::string error;
  bool ready = false;
  bool cancelling = false;
  std::uint64_t cancel_deadline_ns = 0;
};

// Generations that failed or were cancelled, so that nothing more is ever sent for them. The
// oldest are forgotten above a limit; generations are never used again.
class Tombstones {
 public:
  explicit Tombstones(std::size_t limit) : limit_(limit) {}
  void add(std::uint64_t generation, const std::string& error);
  // nullptr: not dead.
  const std::string* find(std::uint64_t generation) const;

 private:
  std::size_t limit_;
  std::unordered_map<std::uint64_t, std::string> errors_;
  std::deque<std::uint64_t> order_;
};

}  // namespace pdx::ucx
