// The least programs that do what RocksDB's plugin has to do: floors of `./x bench rocksdb`.
//
//   c++ -std=c++17 -O2 -o floors tests/perf/floors.cc -lpthread
//   ./floors handover SECONDS            two threads pass a word to each other: rounds a second
//   ./floors sync FILE SECONDS           the same, with a durable write of 4 KiB by the second thread in each round
//   ./floors append FILE MIB             pieces of 1 MiB, each copied once, two writes of 4 MiB in flight: MiB a second
//   ./floors read FILE THREADS SECONDS   threads that read 8 KiB at random, as a block of a table needs: reads a second
//
// FILE has its size already, and is read and written with direct I/O.

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMib = 1 << 20;
// How long a thread polls before it sleeps, as plugins/rocksdb/src/call.rs has it.
constexpr auto kPoll = std::chrono::microseconds(25);

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void Expect(bool holds, const char* what) {
  if (!holds) {
    perror(what);
    exit(1);
  }
}

// A word that one thread sets and another takes: it polls, and then sleeps.
class Word {
 public:
  void Set(int value) {
    if (state_.exchange(value) == kSleeps) {
      std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_one();
    }
  }

  int Take() {
    const auto start = Clock::now();
    while (state_.load() == kNone && Clock::now() - start < kPoll) {
    }
    int none = kNone;
    if (state_.compare_exchange_strong(none, kSleeps)) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return state_.load() != kSleeps; });
    }
    return state_.exchange(kNone);
  }

 private:
  static constexpr int kNone = 0, kSleeps = -1;
  std::atomic<int> state_{kNone};
  std::mutex mutex_;
  std::condition_variable changed_;
};

constexpr int kRound = 1, kEnd = 2;

// Rounds a second of two threads; the second calls `work` in each.
template <typename Work>
double HandOver(double seconds, Work work) {
  Word there, back;
  std::thread second([&] {
    while (there.Take() == kRound) {
      work();
      back.Set(kRound);
    }
  });
  const auto start = Clock::now();
  uint64_t rounds = 0;
  for (; rounds % 16 != 0 || SecondsSince(start) < seconds; rounds++) {
    there.Set(kRound);
    back.Take();
  }
  const double rate = rounds / SecondsSince(start);
  there.Set(kEnd);
  second.join();
  return rate;
}

int Open(const char* path, int flags) {
  const int file = open(path, flags | O_DIRECT | O_CLOEXEC);
  Expect(file >= 0, path);
  return file;
}

char* Memory(size_t bytes) {
  void* memory = aligned_alloc(4096, bytes);
  Expect(memory != nullptr, "memory");
  memset(memory, 'x', bytes);
  return static_cast<char*>(memory);
}

double Sync(const char* path, double seconds) {
  const int file = Open(path, O_RDWR);
  const off_t blocks = lseek(file, 0, SEEK_END) / 4096;
  Expect(blocks > 0, "an empty file");
  iovec part{Memory(4096), 4096};
  off_t block = 0;
  return HandOver(seconds, [&] { Expect(pwritev2(file, &part, 1, block++ % blocks * 4096, RWF_DSYNC) == 4096, "write"); });
}

double Append(const char* path, size_t mib) {
  constexpr size_t kBuffer = 4 * kMib, kInFlight = 2;
  const int file = Open(path, O_RDWR);
  aio_context_t context = 0;
  Expect(syscall(SYS_io_setup, kInFlight, &context) == 0, "io_setup");
  std::vector<char*> free;
  for (size_t i = 0; i <= kInFlight; i++) free.push_back(Memory(kBuffer));
  const std::string piece(kMib, 'y');
  size_t in_flight = 0;
  const auto reap = [&](size_t until) {
    while (in_flight > until) {
      io_event event;
      Expect(syscall(SYS_io_getevents, context, 1, 1, &event, nullptr) == 1 && event.res == kBuffer, "a write");
      free.push_back(reinterpret_cast<char*>(event.data));
      in_flight--;
    }
  };
  const auto start = Clock::now();
  for (size_t at = 0; at + 4 <= mib; at += 4) {
    char* buffer = free.back();
    free.pop_back();
    for (size_t i = 0; i < 4; i++) memcpy(buffer + i * kMib, piece.data(), kMib);
    reap(kInFlight - 1);
    iocb request{};
    request.aio_data = request.aio_buf = reinterpret_cast<uint64_t>(buffer);
    request.aio_lio_opcode = IOCB_CMD_PWRITE;
    request.aio_fildes = file;
    request.aio_nbytes = kBuffer;
    request.aio_offset = at * kMib;
    iocb* requests[] = {&request};
    Expect(syscall(SYS_io_submit, context, 1, requests) == 1, "io_submit");
    in_flight++;
  }
  reap(0);
  Expect(fdatasync(file) == 0, "fdatasync");
  return mib / SecondsSince(start);
}

double Read(const char* path, int threads, double seconds) {
  const int file = Open(path, O_RDONLY);
  const off_t blocks = lseek(file, 0, SEEK_END) / 4096 - 1;
  Expect(blocks > 0, "a file that is too small");
  std::atomic<uint64_t> reads{0};
  std::vector<std::thread> readers;
  const auto start = Clock::now();
  for (int i = 0; i < threads; i++) {
    readers.emplace_back([&, i] {
      std::minstd_rand random(i + 1);
      char* memory = Memory(8192);
      while (SecondsSince(start) < seconds) {
        Expect(pread(file, memory, 8192, random() % blocks * 4096) == 8192, "a read");
        reads++;
      }
    });
  }
  for (auto& reader : readers) reader.join();
  return reads / SecondsSince(start);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "handover" && count == 3) {
    printf("%.0f rounds/s\n", HandOver(atof(arguments[2]), [] {}));
  } else if (what == "sync" && count == 4) {
    printf("%.1f writes/s\n", Sync(arguments[2], atof(arguments[3])));
  } else if (what == "append" && count == 4) {
    printf("%.1f MiB/s\n", Append(arguments[2], atoi(arguments[3])));
  } else if (what == "read" && count == 5) {
    printf("%.0f reads/s\n", Read(arguments[2], atoi(arguments[3]), atof(arguments[4])));
  } else {
    fprintf(stderr, "usage: floors handover SECONDS | sync FILE SECONDS | append FILE MIB | read FILE THREADS SECONDS\n");
    return 2;
  }
  return 0;
}
