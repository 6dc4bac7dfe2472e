// Copies of runs between a pool and a contiguous staging buffer: the body of the gather and scatter
// kernels. One warp copies one run; its lanes take words in turn, 16 bytes wide where both
// addresses allow it.
#pragma once
#include "pdx/cuda_portable.h"
#include "pdx/run_buffer.h"

namespace pdx::cuda {

// A run is copied in pieces of this size, by more than one warp where it has several. A multiple of
// every word size, so that all pieces but the first are aligned as the first one is.
constexpr i64 kPieceBytes = 16 << 10;

enum class Direction {
  kGather,   // source side of the runs to staging
  kScatter,  // staging to destination side of the runs
};

// Runs and both ends of their copies, in memory that the executing processor reads.
struct CopyView {
  const Run* runs;
  const i64* staging_offsets;  // of each run
  i64 count;
  const u64* region_addresses;  // of the pool's regions
  const i64* region_bytes;
  i64 regions;
  unsigned char* staging;  // holds bytes [first_byte, first_byte + staging_bytes) of all runs
  i64 staging_bytes;
  i64 first_byte;  // 0 or more
};

// Which worker of how many.
struct Turn {
  i64 index;
  i64 count;
};

struct alignas(16) Word16 {
  u64 low;
  u64 high;
};

// Lanes take words in turn; four loads are under way before the first store.
template <typename Word>
PDX_HOST_DEVICE inline void copy_words(unsigned char* to, const unsigned char* from, i64 words,
                                       Turn lane) {
  constexpr i64 kSize = sizeof(Word);
  i64 at = lane.index;
  for (; at + 3 * lane.count < words; at += 4 * lane.count) {
    const i64 step = lane.count * kSize;
    const unsigned char* const begin = from + at * kSize;
    unsigned char* const target = to + at * kSize;
    const Word first = load<Word>(begin);
    const Word second = load<Word>(begin + step);
    const Word third = load<Word>(begin + 2 * step);
    const Word fourth = load<Word>(begin + 3 * step);
    store(target, first);
    store(target + step, second);
    store(target + 2 * step, third);
    store(target + 3 * step, fourth);
  }
  for (; at < words; at += lane.count) store(to + at * kSize, load<Word>(from + at * kSize));
}

// Widest word, up to 16 bytes, at which both addresses can be aligned together.
PDX_HOST_DEVICE inline i64 shared_alignment(const unsigned char* a, const unsigned char* b) {
  const u64 differ = reinterpret_cast<u64>(a) ^ reinterpret_cast<u64>(b);
  i64 width = 16;
  while ((differ & static_cast<u64>(width - 1)) != 0) width /= 2;
  return width;
}

PDX_HOST_DEVICE inline void copy_bytes(unsigned char* to, const unsigned char* from, i64 length,
                                       Turn lane) {
  const i64 width = shared_alignment(to, from);
  const i64 past = static_cast<i64>(reinterpret_cast<u64>(from) & static_cast<u64>(width - 1));
  i64 head = past == 0 ? 0 : width - past;
  if (head > length) head = length;
  copy_words<unsigned char>(to, from, head, lane);
  const i64 words = (length - head) / width;
  to += head;
  from += head;
  if (width == 16) {
    copy_words<Word16>(to, from, words, lane);
  } else if (width == 8) {
    copy_words<u64>(to, from, words, lane);
  } else if (width == 4) {
    copy_words<std::uint32_t>(to, from, words, lane);
  } else if (width == 2) {
    copy_words<std::uint16_t>(to, from, words, lane);
  } else {
    copy_words<unsigned char>(to, from, words, lane);
  }
  const i64 done = words * width;
  copy_words<unsigned char>(to + done, from + done, length - head - done, lane);
}

// [offset, offset + length) lies in [0, limit); nothing wraps.
PDX_HOST_DEVICE inline bool is_inside(i64 offset, i64 length, i64 limit) {
  return offset >= 0 && length >= 0 && length <= limit && offset <= limit - length;
}

// Copies pieces piece.index, piece.index + piece.count, ... of run `row`. A run that leaves its
// region or the staging buffer is not touched and reports its row.
PDX_HOST_DEVICE inline void copy_run(const CopyView& copies, Direction direction, i64 row,
                                     Turn piece, Turn lane, u64* first_bad) {
  const bool gather = direction == Direction::kGather;
  const Run& run = copies.runs[row];
  const i64 region = gather ? run.source_region : run.destination_region;
  const i64 offset = gather ? run.source_offset : run.destination_offset;
  const i64 placed = copies.staging_offsets[row];
  const bool good = region >= 0 && region < copies.regions && placed >= copies.first_byte &&
                    is_inside(offset, run.length, copies.region_bytes[region]) &&
                    is_inside(placed - copies.first_byte, run.length, copies.staging_bytes);
  if (!good) {
    if (piece.index == 0 && lane.index == 0) report_bad_row(first_bad, row);
    return;
  }
  auto* const pool =
      reinterpret_cast<unsigned char*>(copies.region_addresses[region] + static_cast<u64>(offset));
  unsigned char* const staged = copies.staging + (placed - copies.first_byte);
  unsigned char* const to = gather ? staged : pool;
  const unsigned char* const from = gather ? pool : staged;
  for (i64 begin = piece.index * kPieceBytes; begin < run.length;
       begin += piece.count * kPieceBytes) {
    const i64 left = run.length - begin;
    copy_bytes(to + begin, from + begin, left < kPieceBytes ? left : kPieceBytes, lane);
  }
}

}  // namespace pdx::cuda
