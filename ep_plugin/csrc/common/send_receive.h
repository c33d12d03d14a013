// Send and receive inside a node: the layout of the memory in which messages travel.
//
// Words of this file:
//   channel  messages of one source, destination and channel arrive in the order of their sends
//   lane     the way of one source and channel to this rank, in this rank's memory: cells that form a ring
//   cell     the place of one chunk in a lane
//   chunk    the part of a message that fits into a cell. A message has at least one chunk, also if it has no bytes.
//            Chunks are counted over all messages of a lane
//
// Memory order. The source writes a cell, then `sent` with release order. The receiver reads the cell, then writes
// `consumed` with release order. Both words only grow.
#pragma once
#include <cstdint>

#include "common/api.h"
#include "common/views.h"

namespace ep {

constexpr int kMaxMessageChannels = 16;
constexpr int kLaneCells = 16;
constexpr int64_t kLaneCellBytes = 64 * 1024;

// On CPUs every chunk carries its message's header. The receiver compares it with what it expects before it writes
// anything.
struct MessageHeader {
  uint64_t number;  // the message's number in its lane, 1 for the first
  int64_t bytes;    // bytes of the message
  int64_t dtype;    // a number for each dtype of torch and order of dimensions
};

struct alignas(128) LaneCell {
  MessageHeader header;
  alignas(64) char data[kLaneCellBytes];
};

struct Lane {
  alignas(128) uint64_t sent;      // chunks that the source has written
  alignas(128) uint64_t consumed;  // chunks that the receiver has read
  LaneCell cells[kLaneCells];
};

// Lets a peer wake a rank that sleeps until something arrives, or until there is room.
struct alignas(128) MessageBell {
  uint32_t rings;
  uint32_t sleepers;
};

// A rank's memory: its bell, then lanes [num_channels][num_ranks]. It starts as zeros.
EP_HD constexpr int64_t message_memory_bytes(int num_ranks, int num_channels) {
  return static_cast<int64_t>(sizeof(MessageBell)) + static_cast<int64_t>(sizeof(Lane)) * num_ranks * num_channels;
}
EP_HD MessageBell& bell_in(Address memory) { return *at<MessageBell>(memory); }
EP_HD Lane& lane_in(Address memory, int num_ranks, int channel, int source) {
  return at<Lane>(memory, sizeof(MessageBell))[channel * num_ranks + source];
}

// A message as one of its two ends posts it. `data` stays the caller's, who keeps it until the message is over.
struct Message {
  int32_t peer;  // index in the node
  int32_t channel;
  int32_t receives;  // 1: from the peer; 0: to the peer
  int32_t reserved;
  Address data;
  int64_t bytes;
  int64_t dtype;
};
// The fields on which the two ends must agree, as faults number them.
enum MessageField : int { kMessageBytes = 0, kMessageDtype = 1, kMessageNumber = 2 };

// --- GPU ranks -------------------------------------------------------------------------------------------------------
// Here a lane has parts, and a CTA at each end moves one of them: chunk c of a message belongs to part c % parts. Every
// part counts its own chunks. `written` and `read` are in device memory so that a CUDA graph that is replayed advances
// them.
constexpr int kMessageParts = 32;
constexpr int kPartCells = 16;
constexpr int64_t kPartCellBytes = 16 * 1024;
constexpr int64_t kLeastChunkBytes = 4 * 1024;
constexpr int kPartsOfSm = 4;  // CTAs of messages that run on an SM at the same time

// Each rank has these words for each peer, channel and part. They start as zeros, and only grow.
struct PartWords {
  alignas(128) uint64_t sent;      // by the peer: its chunks in this rank's cells
  alignas(128) uint64_t consumed;  // by the peer: this rank's chunks that it has read
  alignas(128) uint64_t written;   // this rank's own: its chunks in the peer's cells
  uint64_t read;                   // this rank's own: the peer's chunks that it has read
};

// A rank's memory has [num_channels][num_ranks] of these: the words that it shares with a peer, and the cells that the
// peer fills. In each part of a message the first cell has the message's header, without its number. The receiver
// compares it with what it expects before it reads anything. Cells that parts fill at the same time lie side by side.
struct DeviceLane {
  PartWords words[kMessageParts];
  alignas(128) MessageHeader headers[kPartCells][kMessageParts];
  alignas(128) char cells[kPartCells][kMessageParts][kPartCellBytes];
};

EP_HD constexpr int64_t device_message_memory_bytes(int num_ranks, int num_channels) {
  return static_cast<int64_t>(sizeof(DeviceLane)) * num_ranks * num_channels;
}

// The cut of a message into chunks. Both ends compute it from the message's size.
struct MessageCut {
  int64_t chunk_bytes;  // bytes of each chunk but the last
  int64_t chunks;
  int parts;
};
EP_HD constexpr MessageCut cut_message(int64_t bytes) {
  const int64_t equal = align_up(ceil_div(bytes, kMessageParts), kLeastChunkBytes);
  const int64_t chunk = equal < kLeastChunkBytes ? kLeastChunkBytes : equal < kPartCellBytes ? equal : kPartCellBytes;
  const int64_t chunks = bytes == 0 ? 1 : ceil_div(bytes, chunk);
  return MessageCut{chunk, chunks, static_cast<int>(chunks < kMessageParts ? chunks : kMessageParts)};
}

// The SMs that one end of a message of so many bytes occupies.
EP_HD constexpr int message_sms(int64_t bytes) { return ceil_div(cut_message(bytes).parts, kPartsOfSm); }

// One end of a message. comm.control[r]: the memory of rank r, as mapped here.
struct DeviceMessageArgs {
  Comm comm;
  Message message;
  Address stream;
};

namespace cuda {  // only in builds with CUDA
void send_message(const DeviceMessageArgs& args);
void receive_message(const DeviceMessageArgs& args);
// Loads both kernels. A kernel that spins may keep the driver from loading another.
void load_message_kernels();
}  // namespace cuda

}  // namespace ep
