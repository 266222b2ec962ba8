// What RocksDB's tools do not do with a file system, or do not show: forks, threads that outlive it, readers of files
// that are replaced, truncated and deleted, reads that are aborted, and appends of one thread.
//
//   c++ -std=c++17 -O2 -o probe tests/interop/rocksdb_probe.cc -lrocksdb -lpthread
//   LD_PRELOAD=libringbolt_rocksdb.so ./probe fork|exit|readers|async|append URI [NUMBER [DIRECTORY]]

#include <rocksdb/convenience.h>
#include <rocksdb/env.h>
#include <rocksdb/file_system.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

using namespace ROCKSDB_NAMESPACE;
using Clock = std::chrono::steady_clock;

namespace {

const IOOptions kIo;
const FileOptions kFile;
constexpr size_t kBlock = 4096;

void Check(const Status& status, const std::string& what) {
  if (!status.ok()) {
    fprintf(stderr, "%s: %s\n", what.c_str(), status.ToString().c_str());
    _exit(1);
  }
}

void Expect(bool holds, const std::string& what) {
  if (!holds) {
    fprintf(stderr, "%s\n", what.c_str());
    _exit(1);
  }
}

std::shared_ptr<FileSystem> Open(const std::string& uri) {
  std::shared_ptr<FileSystem> fs;
  Check(FileSystem::CreateFromString(ConfigOptions(), uri, &fs), uri);
  return fs;
}

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Each block names its file, its generation and its index.
struct BlockHead {
  uint64_t magic, file, generation, index;
};
constexpr uint64_t kMagic = 0x72696e67626f6c74;

void Fill(std::string* data, uint64_t file, uint64_t generation, uint64_t first, size_t blocks) {
  data->assign(blocks * kBlock, static_cast<char>('a' + generation % 26));
  for (size_t i = 0; i < blocks; i++) {
    const BlockHead head{kMagic, file, generation, first + i};
    memcpy(&(*data)[i * kBlock], &head, sizeof(head));
  }
}

std::string NameOf(uint64_t file) { return "/probe/file" + std::to_string(file); }

void Write(FileSystem* fs, const std::string& name, uint64_t file, uint64_t generation, size_t blocks, bool sync) {
  std::unique_ptr<FSWritableFile> out;
  IOStatus status = fs->NewWritableFile(name, kFile, &out, nullptr);
  std::string data;
  Fill(&data, file, generation, 0, blocks);
  for (size_t at = 0; status.ok() && at < data.size(); at += 64 * kBlock) {
    status = out->Append(Slice(data).size() - at < 64 * kBlock ? Slice(&data[at], data.size() - at) : Slice(&data[at], 64 * kBlock),
                         kIo, nullptr);
  }
  if (status.ok() && sync) status = out->Sync(kIo, nullptr);
  if (status.ok()) status = out->Close(kIo, nullptr);
  Check(status, name);
}

// A child that exits does not wait for a reactor that it does not have, and its parent's store stays open.
int Fork(const std::string& uri) {
  auto fs = Open(uri);
  Check(fs->CreateDirIfMissing("/probe", kIo, nullptr), "/probe");
  Write(fs.get(), NameOf(1), 1, 1, 100, true);
  std::unique_ptr<FSRandomAccessFile> file;
  Check(fs->NewRandomAccessFile(NameOf(1), kFile, &file, nullptr), NameOf(1));
  char scratch[kBlock];
  Slice data;
  Check(file->Read(0, kBlock, kIo, &data, scratch, nullptr), "the parent's read");
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    Expect(!file->Read(0, kBlock, kIo, &data, scratch, nullptr).ok(), "a fork reads its parent's file");
    Expect(!fs->DeleteFile(NameOf(1), kIo, nullptr).ok(), "a fork deletes its parent's file");
    std::shared_ptr<FileSystem> other;
    Expect(!FileSystem::CreateFromString(ConfigOptions(), uri + "&create=1", &other).ok(), "a fork opens the store");
    exit(0);
  }
  int status = 0;
  Expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
         "the child ended with " + std::to_string(status));
  Check(file->Read(kBlock, kBlock, kIo, &data, scratch, nullptr), "the parent's read after the fork");
  Write(fs.get(), NameOf(2), 2, 1, 10, true);
  return 0;
}

// The process exits while threads have files open and read; the store is closed and opened in between.
int Exit(const std::string& uri) {
  for (int round = 0; round < 2; round++) {
    auto fs = Open(uri);
    Check(fs->CreateDirIfMissing("/probe", kIo, nullptr), "/probe");
    Write(fs.get(), NameOf(1), 1, 1, 100, true);
    std::unique_ptr<FSRandomAccessFile> file;
    Check(fs->NewRandomAccessFile(NameOf(1), kFile, &file, nullptr), NameOf(1));
    std::thread([&] {
      char scratch[kBlock];
      Slice data;
      Check(file->Read(0, kBlock, kIo, &data, scratch, nullptr), "a thread's read");
    }).join();
  }
  static auto fs = Open(uri);
  static std::atomic<uint64_t> reads{0};
  for (int i = 0; i < 3; i++) {
    std::thread([] {
      std::unique_ptr<FSRandomAccessFile> file;
      Check(fs->NewRandomAccessFile(NameOf(1), kFile, &file, nullptr), NameOf(1));
      char scratch[kBlock];
      Slice data;
      // Until the store is closed under it.
      while (file->Read(reads % 50 * kBlock, kBlock, kIo, &data, scratch, nullptr).ok()) reads++;
      for (;;) pause();
    }).detach();
  }
  while (reads < 1000) std::this_thread::yield();
  exit(0);
}

constexpr uint64_t kFiles = 6;
std::atomic<bool> is_over{false};
std::atomic<uint64_t> reads_done{0}, changes_done{0};

// Whatever happens to the name, an open file has its own blocks.
void ReadFiles(FileSystem* fs, unsigned seed) {
  std::minstd_rand random(seed);
  std::vector<char> scratch(16 * kBlock + 64);
  while (!is_over) {
    const uint64_t number = random() % kFiles;
    std::unique_ptr<FSRandomAccessFile> file;
    IOStatus status = fs->NewRandomAccessFile(NameOf(number), kFile, &file, nullptr);
    if (status.IsPathNotFound() || status.IsNotFound()) continue;
    Check(status, NameOf(number));
    uint64_t generation = 0;
    for (int i = 0; i < 30; i++) {
      const uint64_t first = random() % 300;
      const size_t blocks = 1 + random() % 16;
      Slice data;
      char* to = scratch.data() + random() % 2 * 8;
      Check(file->Read(first * kBlock, blocks * kBlock, kIo, &data, to, nullptr), NameOf(number));
      for (size_t block = 0; (block + 1) * kBlock <= data.size(); block++) {
        BlockHead head;
        memcpy(&head, data.data() + block * kBlock, sizeof(head));
        generation = generation == 0 ? head.generation : generation;
        const bool is_right = head.magic == kMagic && head.file == number && head.index == first + block &&
                              head.generation == generation;
        Expect(is_right, NameOf(number) + ": block " + std::to_string(first + block) + " is block " +
                             std::to_string(head.index) + " of file " + std::to_string(head.file) + ", generation " +
                             std::to_string(head.generation) + " and not " + std::to_string(generation));
      }
      reads_done++;
    }
  }
}

void ChangeFiles(FileSystem* fs, uint64_t number, unsigned seed) {
  std::minstd_rand random(seed);
  const std::string name = NameOf(number), fresh = name + ".new";
  for (uint64_t generation = 1; !is_over; generation++, changes_done++) {
    Write(fs, fresh, number, generation, 1 + random() % 700, random() % 2);
    Check(fs->RenameFile(fresh, name, kIo, nullptr), fresh);
    if (random() % 3 == 0) {
      uint64_t size = 0;
      Check(fs->GetFileSize(name, kIo, &size, nullptr), name);
      Check(fs->Truncate(name, random() % (size / kBlock + 1) * kBlock, kIo, nullptr), name);
    }
    if (random() % 3 == 0) {
      std::unique_ptr<FSWritableFile> out;
      Check(fs->ReopenWritableFile(name, kFile, &out, nullptr), name);
      const uint64_t size = out->GetFileSize(kIo, nullptr);
      std::string data;
      Fill(&data, number, generation, size / kBlock, 1 + random() % 100);
      Check(out->Append(data, kIo, nullptr), name);
      Check(out->Close(kIo, nullptr), name);
    }
    if (random() % 4 == 0) Check(fs->DeleteFile(name, kIo, nullptr), name);
  }
}

int Readers(const std::string& uri, int seconds) {
  auto fs = Open(uri);
  Check(fs->CreateDirIfMissing("/probe", kIo, nullptr), "/probe");
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; i++) threads.emplace_back(ReadFiles, fs.get(), 100 + i);
  for (uint64_t i = 0; i < kFiles; i++) threads.emplace_back(ChangeFiles, fs.get(), i, 200 + i);
  std::this_thread::sleep_for(std::chrono::seconds(seconds));
  is_over = true;
  for (auto& thread : threads) thread.join();
  printf("%llu reads, %llu changes\n", static_cast<unsigned long long>(reads_done.load()),
         static_cast<unsigned long long>(changes_done.load()));
  return reads_done > 0 && changes_done > 0 ? 0 : 1;
}

// Reads of ReadAsync: some are waited for, some aborted, some deleted. Only the first write to their memory.
int Async(const std::string& uri) {
  auto fs = Open(uri);
  Check(fs->CreateDirIfMissing("/probe", kIo, nullptr), "/probe");
  constexpr size_t kReads = 90, kBlocks = 80;
  Write(fs.get(), NameOf(1), 1, 1, kBlocks, true);
  std::unique_ptr<FSRandomAccessFile> file;
  Check(fs->NewRandomAccessFile(NameOf(1), kFile, &file, nullptr), NameOf(1));
  struct Read {
    std::vector<char> scratch = std::vector<char>(kBlock, '?');
    void* handle = nullptr;
    IOHandleDeleter deleter;
    int calls = 0;
    IOStatus status;
    size_t length = 0;
  };
  std::vector<Read> reads(kReads);
  for (size_t i = 0; i < kReads; i++) {
    FSReadRequest request;
    request.offset = i * kBlock;
    request.len = kBlock;
    request.scratch = reads[i].scratch.data();
    auto done = [](const FSReadRequest& ended, void* argument) {
      auto* read = static_cast<Read*>(argument);
      read->calls++;
      read->status = ended.status;
      read->length = ended.result.size();
    };
    Check(file->ReadAsync(request, kIo, done, &reads[i], &reads[i].handle, &reads[i].deleter, nullptr), "ReadAsync");
    Expect(reads[i].handle != nullptr && reads[i].calls == 0, "the read was not begun");
  }
  std::vector<void*> polled, aborted;
  for (size_t i = 0; i < kReads; i++) {
    if (i % 3 == 0) polled.push_back(reads[i].handle);
    if (i % 3 == 1) aborted.push_back(reads[i].handle);
  }
  Check(fs->AbortIO(aborted), "AbortIO");
  Check(fs->Poll(polled, polled.size()), "Poll");
  // They have ended: nothing happens.
  Check(fs->Poll(polled, polled.size()), "a second Poll");
  Check(fs->AbortIO(polled), "AbortIO of what has ended");
  for (auto& read : reads) read.deleter(read.handle);
  for (size_t i = 0; i < kReads; i++) {
    const std::string name = "read " + std::to_string(i);
    Expect(reads[i].calls == (i % 3 == 2 ? 0 : 1), name + ": " + std::to_string(reads[i].calls) + " callbacks");
    if (i % 3 == 0 && i < kBlocks) {
      BlockHead head;
      memcpy(&head, reads[i].scratch.data(), sizeof(head));
      Check(reads[i].status, name);
      Expect(reads[i].length == kBlock && head.magic == kMagic && head.index == i, name + " has other data");
      continue;
    }
    Expect(i % 3 != 1 || reads[i].status.IsAborted(), name + ": " + reads[i].status.ToString());
    Expect(reads[i].length == 0, name + " has data");
    for (char byte : reads[i].scratch) Expect(byte == '?', name + " wrote to its memory");
  }
  return 0;
}

// One thread appends pieces of 1 MiB and syncs at the end.
int Append(const std::string& uri, int mib, const std::string& directory) {
  auto fs = Open(uri);
  Check(fs->CreateDirIfMissing(directory, kIo, nullptr), directory);
  const std::string data(1 << 20, 'x'), name = directory + "/append";
  std::unique_ptr<FSWritableFile> out;
  Check(fs->NewWritableFile(name, kFile, &out, nullptr), name);
  const auto start = Clock::now();
  for (int i = 0; i < mib; i++) Check(out->Append(data, kIo, nullptr), "an append");
  Check(out->Sync(kIo, nullptr), "the sync");
  Check(out->Close(kIo, nullptr), "the close");
  printf("%.1f MiB/s\n", mib / SecondsSince(start));
  Check(fs->DeleteFile(name, kIo, nullptr), name);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 2 ? arguments[1] : "", uri = count > 2 ? arguments[2] : "";
  const int number = count > 3 ? atoi(arguments[3]) : 5;
  if (what == "fork") return Fork(uri);
  if (what == "exit") return Exit(uri);
  if (what == "readers") return Readers(uri, number);
  if (what == "async") return Async(uri);
  if (what == "append") return Append(uri, number, count > 4 ? arguments[4] : "/probe");
  fprintf(stderr, "usage: probe fork|exit|readers|async|append URI [NUMBER [DIRECTORY]]\n");
  return 2;
}
