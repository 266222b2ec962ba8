// RocksDB's FileSystem over the functions of the Rust library.
//
// This file has nothing but the translation of types: what a call means is in the Rust crates. It is compiled
// against the headers of the RocksDB that will load it (./x plugin rocksdb), since RocksDB's classes change
// with its version.

#include <rocksdb/env.h>
#include <rocksdb/file_system.h>
#include <rocksdb/utilities/object_registry.h>
#include <rocksdb/version.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

using namespace ROCKSDB_NAMESPACE;

namespace {

// The layouts of host/rocksdb-abi/src/table.rs and error.rs.

constexpr uint32_t kLayout = 3;

enum ErrorKind : int32_t {
  kErrorNotFound = 1,
  kErrorNoSpace = 2,
  kErrorIo = 3,
  kErrorCorruption = 4,
  kErrorBusy = 5,
  kErrorInvalid = 6,
  kErrorNotSupported = 7,
};

enum FileOpen : int32_t { kRead = 0, kCreate = 1, kReopen = 2, kReuse = 3, kReadWrite = 4 };

struct ErrorText {
  int32_t kind = 0;
  char text[1024] = {0};
};

struct Bytes {
  const char* data;
  size_t length;
};

struct FileReadOfShim {
  uint64_t offset;
  char* out;
  size_t length;
  size_t read;
  ErrorText error;
};

using Store = const void*;
using File = const void*;
using BegunRead = const void*;
using ListCallback = void (*)(void*, Bytes, bool, uint64_t);

struct FunctionTable {
  uint32_t layout;
  const void* definition;
  bool (*store_open)(const void*, Bytes, Store*, ErrorText*);
  void (*store_close)(Store);
  void (*close_all)(const void*);
  bool (*open)(Store, Bytes, int32_t, File*, ErrorText*);
  bool (*lock)(Store, Bytes, File*, ErrorText*);
  bool (*status)(Store, Bytes, bool*, uint64_t*, ErrorText*);
  bool (*list)(Store, Bytes, ListCallback, void*, ErrorText*);
  bool (*unlink)(Store, Bytes, ErrorText*);
  bool (*make_directory)(Store, Bytes, ErrorText*);
  bool (*remove_directory)(Store, Bytes, ErrorText*);
  bool (*rename)(Store, Bytes, Bytes, ErrorText*);
  bool (*sync_directory)(Store, Bytes, ErrorText*);
  bool (*free_bytes)(Store, uint64_t*, ErrorText*);
  uint64_t (*size)(File);
  bool (*read)(File, uint64_t, char*, size_t, size_t*, ErrorText*);
  void (*read_many)(File, FileReadOfShim*, size_t);
  bool (*begin_read)(File, uint64_t, size_t, BegunRead*, ErrorText*);
  bool (*finish_read)(BegunRead, char*, size_t, size_t*, ErrorText*);
  void (*drop_read)(BegunRead);
  bool (*append)(File, Bytes, ErrorText*);
  bool (*write)(File, uint64_t, Bytes, ErrorText*);
  bool (*write_out)(File, ErrorText*);
  bool (*allocate)(File, uint64_t, ErrorText*);
  bool (*sync)(File, ErrorText*);
  bool (*truncate)(File, uint64_t, ErrorText*);
  bool (*close)(File, ErrorText*);
  void (*free)(File);
};

extern "C" const FunctionTable* ringbolt_rocksdb_functions();

const FunctionTable& Functions() {
  static const FunctionTable* functions = ringbolt_rocksdb_functions();
  return *functions;
}

Bytes BytesOf(const Slice& slice) { return Bytes{slice.data(), slice.size()}; }

// A path that is not there is no IOError(kNone): RocksDB asks IsPathNotFound.
IOStatus StatusOf(const ErrorText& error, const std::string& name) {
  const Slice text(error.text);
  switch (error.kind) {
    case kErrorNotFound:
      return IOStatus::PathNotFound(name, text);
    case kErrorNoSpace:
      return IOStatus::NoSpace(name, text);
    case kErrorCorruption:
      return IOStatus::Corruption(name, text);
    case kErrorInvalid:
      return IOStatus::InvalidArgument(name, text);
    case kErrorNotSupported:
      return IOStatus::NotSupported(name, text);
    default:
      return IOStatus::IOError(name, text);
  }
}

// An open file; the last of its users frees it, which closes it.
class Handle {
 public:
  Handle(File file, std::string name) : file_(file), name_(std::move(name)) {}
  ~Handle() { Functions().free(file_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  File file() const { return file_; }
  const std::string& name() const { return name_; }

  template <typename Call>
  IOStatus Run(Call call) const {
    ErrorText error;
    return call(&error) ? IOStatus::OK() : StatusOf(error, name_);
  }

  IOStatus Read(uint64_t offset, size_t n, Slice* result, char* scratch) const {
    size_t read = 0;
    IOStatus status = Run([&](ErrorText* e) { return Functions().read(file_, offset, scratch, n, &read, e); });
    *result = Slice(scratch, read);
    return status;
  }

  IOStatus Sync() const {
    return Run([&](ErrorText* e) { return Functions().sync(file_, e); });
  }

  IOStatus Close() const {
    return Run([&](ErrorText* e) { return Functions().close(file_, e); });
  }

 private:
  const File file_;
  const std::string name_;
};

class SequentialFile : public FSSequentialFile {
 public:
  SequentialFile(File file, const std::string& name) : handle_(file, name) {}

  IOStatus Read(size_t n, const IOOptions&, Slice* result, char* scratch, IODebugContext*) override {
    IOStatus status = handle_.Read(offset_, n, result, scratch);
    offset_ += result->size();
    return status;
  }

  IOStatus Skip(uint64_t n) override {
    offset_ += n;
    return IOStatus::OK();
  }

  IOStatus PositionedRead(uint64_t offset, size_t n, const IOOptions&, Slice* result, char* scratch,
                          IODebugContext*) override {
    return handle_.Read(offset, n, result, scratch);
  }

 private:
  Handle handle_;
  uint64_t offset_ = 0;
};

// A read of ReadAsync. RocksDB deletes it after Poll or AbortIO, which call its callback.
class AsyncRead {
 public:
  using Callback = std::function<void(const FSReadRequest&, void*)>;

  AsyncRead(const FSReadRequest& request, Callback callback, void* argument, const std::string& name)
      : request_(request), callback_(std::move(callback)), argument_(argument), name_(name) {}
  ~AsyncRead() {
    if (begun_ != nullptr) Functions().drop_read(begun_);
  }
  AsyncRead(const AsyncRead&) = delete;
  AsyncRead& operator=(const AsyncRead&) = delete;

  IOStatus Begin(File file) {
    ErrorText error;
    const bool done = Functions().begin_read(file, request_.offset, request_.len, &begun_, &error);
    return done ? IOStatus::OK() : StatusOf(error, name_);
  }

  void Finish() {
    if (begun_ == nullptr) return;
    ErrorText error;
    size_t read = 0;
    const bool done = Functions().finish_read(begun_, request_.scratch, request_.len, &read, &error);
    End(done ? IOStatus::OK() : StatusOf(error, name_), read);
  }

  void Abort() {
    if (begun_ == nullptr) return;
    Functions().drop_read(begun_);
    End(IOStatus::Aborted(), 0);
  }

 private:
  void End(IOStatus status, size_t read) {
    begun_ = nullptr;
    request_.status = status;
    request_.result = Slice(request_.scratch, read);
    callback_(request_, argument_);
  }

  FSReadRequest request_;
  const Callback callback_;
  void* const argument_;
  const std::string name_;
  BegunRead begun_ = nullptr;
};

class RandomAccessFile : public FSRandomAccessFile {
 public:
  RandomAccessFile(File file, const std::string& name) : handle_(file, name) {}

  IOStatus Read(uint64_t offset, size_t n, const IOOptions&, Slice* result, char* scratch,
                IODebugContext*) const override {
    return handle_.Read(offset, n, result, scratch);
  }

  IOStatus MultiRead(FSReadRequest* requests, size_t count, const IOOptions&, IODebugContext*) override {
    std::vector<FileReadOfShim> reads(count);
    for (size_t i = 0; i < count; i++) {
      reads[i].offset = requests[i].offset;
      reads[i].out = requests[i].scratch;
      reads[i].length = requests[i].len;
    }
    Functions().read_many(handle_.file(), reads.data(), count);
    for (size_t i = 0; i < count; i++) {
      const bool done = reads[i].error.kind == 0;
      requests[i].status = done ? IOStatus::OK() : StatusOf(reads[i].error, handle_.name());
      requests[i].result = Slice(requests[i].scratch, done ? reads[i].read : 0);
    }
    return IOStatus::OK();
  }

  IOStatus ReadAsync(FSReadRequest& request, const IOOptions&, AsyncRead::Callback callback, void* argument,
                     void** io_handle, IOHandleDeleter* deleter, IODebugContext*) override {
    auto read = std::make_unique<AsyncRead>(request, std::move(callback), argument, handle_.name());
    IOStatus status = read->Begin(handle_.file());
    if (!status.ok()) return status;
    *io_handle = read.release();
    *deleter = [](void* handle) { delete static_cast<AsyncRead*>(handle); };
    return status;
  }

 private:
  Handle handle_;
};

// No page cache is in between, so that options for direct I/O change nothing.
class WritableFile : public FSWritableFile {
 public:
  WritableFile(File file, const std::string& name, const FileOptions& options)
      : FSWritableFile(options), handle_(file, name) {}

  IOStatus Append(const Slice& data, const IOOptions&, IODebugContext*) override {
    return handle_.Run([&](ErrorText* e) { return Functions().append(handle_.file(), BytesOf(data), e); });
  }
  using FSWritableFile::Append;

  IOStatus Truncate(uint64_t size, const IOOptions&, IODebugContext*) override {
    return size == Size() ? IOStatus::OK() : TruncateTo(size);
  }

  IOStatus Close(const IOOptions&, IODebugContext*) override { return handle_.Close(); }

  // What is appended is visible at once, to readers of this process.
  IOStatus Flush(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }

  IOStatus Sync(const IOOptions&, IODebugContext*) override { return handle_.Sync(); }

  IOStatus Fsync(const IOOptions&, IODebugContext*) override { return handle_.Sync(); }

  bool IsSyncThreadSafe() const override { return true; }

  uint64_t GetFileSize(const IOOptions&, IODebugContext*) override { return Size(); }

  // RocksDB says how large it expects a file to be, before the first byte.
  IOStatus Allocate(uint64_t offset, uint64_t bytes, const IOOptions&, IODebugContext*) override {
    return handle_.Run([&](ErrorText* e) { return Functions().allocate(handle_.file(), offset + bytes, e); });
  }

  // Never a promise: it begins to write what is in memory.
  IOStatus RangeSync(uint64_t, uint64_t, const IOOptions&, IODebugContext*) override {
    return handle_.Run([&](ErrorText* e) { return Functions().write_out(handle_.file(), e); });
  }

 private:
  uint64_t Size() const { return Functions().size(handle_.file()); }

  IOStatus TruncateTo(uint64_t size) const {
    return handle_.Run([&](ErrorText* e) { return Functions().truncate(handle_.file(), size, e); });
  }

  Handle handle_;
};

class RandomRWFile : public FSRandomRWFile {
 public:
  RandomRWFile(File file, const std::string& name) : handle_(file, name) {}

  IOStatus Write(uint64_t offset, const Slice& data, const IOOptions&, IODebugContext*) override {
    return handle_.Run(
        [&](ErrorText* e) { return Functions().write(handle_.file(), offset, BytesOf(data), e); });
  }

  IOStatus Read(uint64_t offset, size_t n, const IOOptions&, Slice* result, char* scratch,
                IODebugContext*) const override {
    return handle_.Read(offset, n, result, scratch);
  }

  IOStatus Flush(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }

  IOStatus Sync(const IOOptions&, IODebugContext*) override { return handle_.Sync(); }

  IOStatus Close(const IOOptions&, IODebugContext*) override { return handle_.Close(); }

 private:
  Handle handle_;
};

class LockOfFile : public FileLock {
 public:
  LockOfFile(File file, const std::string& name) : handle_(file, name) {}
  IOStatus Close() const { return handle_.Close(); }

 private:
  Handle handle_;
};

// An open store, with those who use it: files may live for a moment longer than their file system.
class OpenStore {
 public:
  explicit OpenStore(Store store) : store_(store) {}
  ~OpenStore() { Functions().store_close(store_); }
  OpenStore(const OpenStore&) = delete;
  OpenStore& operator=(const OpenStore&) = delete;
  Store store() const { return store_; }

  IOStatus SyncDirectory(const std::string& name) const {
    ErrorText error;
    const bool done = Functions().sync_directory(store_, BytesOf(name), &error);
    return done ? IOStatus::OK() : StatusOf(error, name);
  }

 private:
  const Store store_;
};

class Directory : public FSDirectory {
 public:
  Directory(std::shared_ptr<OpenStore> store, const std::string& name) : store_(std::move(store)), name_(name) {}

  IOStatus Fsync(const IOOptions&, IODebugContext*) override { return store_->SyncDirectory(name_); }

  IOStatus Close(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }

 private:
  const std::shared_ptr<OpenStore> store_;
  const std::string name_;
};

class RingboltFileSystem : public FileSystem {
 public:
  RingboltFileSystem(std::shared_ptr<OpenStore> store, const std::string& uri)
      : open_(std::move(store)), store_(open_->store()), uri_(uri) {}

  static const char* kClassName() { return "RingboltFileSystem"; }
  const char* Name() const override { return kClassName(); }
  std::string GetId() const override { return uri_; }

  IOStatus NewSequentialFile(const std::string& name, const FileOptions&,
                             std::unique_ptr<FSSequentialFile>* result, IODebugContext*) override {
    return Opened(name, kRead, [&](File file) { result->reset(new SequentialFile(file, name)); });
  }

  IOStatus NewRandomAccessFile(const std::string& name, const FileOptions&,
                               std::unique_ptr<FSRandomAccessFile>* result, IODebugContext*) override {
    return Opened(name, kRead, [&](File file) { result->reset(new RandomAccessFile(file, name)); });
  }

  IOStatus NewWritableFile(const std::string& name, const FileOptions& options,
                           std::unique_ptr<FSWritableFile>* result, IODebugContext*) override {
    return Opened(name, kCreate, [&](File file) { result->reset(new WritableFile(file, name, options)); });
  }

  IOStatus ReopenWritableFile(const std::string& name, const FileOptions& options,
                              std::unique_ptr<FSWritableFile>* result, IODebugContext*) override {
    return Opened(name, kReopen, [&](File file) { result->reset(new WritableFile(file, name, options)); });
  }

  IOStatus ReuseWritableFile(const std::string& name, const std::string& old_name, const FileOptions& options,
                             std::unique_ptr<FSWritableFile>* result, IODebugContext* dbg) override {
    IOStatus status = RenameFile(old_name, name, options.io_options, dbg);
    if (!status.ok()) return status;
    return Opened(name, kReuse, [&](File file) { result->reset(new WritableFile(file, name, options)); });
  }

  IOStatus NewRandomRWFile(const std::string& name, const FileOptions&, std::unique_ptr<FSRandomRWFile>* result,
                           IODebugContext*) override {
    return Opened(name, kReadWrite, [&](File file) { result->reset(new RandomRWFile(file, name)); });
  }

  IOStatus NewDirectory(const std::string& name, const IOOptions&, std::unique_ptr<FSDirectory>* result,
                        IODebugContext*) override {
    bool is_directory = false;
    uint64_t bytes = 0;
    IOStatus status = StatusOfPath(name, &is_directory, &bytes);
    if (!status.ok()) return status;
    if (!is_directory) return IOStatus::IOError(name, "it is not a directory");
    result->reset(new Directory(open_, name));
    return status;
  }

  IOStatus FileExists(const std::string& name, const IOOptions&, IODebugContext*) override {
    bool is_directory = false;
    uint64_t bytes = 0;
    return NotFoundOf(StatusOfPath(name, &is_directory, &bytes));
  }

  IOStatus GetChildren(const std::string& name, const IOOptions&, std::vector<std::string>* result,
                       IODebugContext*) override {
    result->clear();
    return List(name, result, [](void* context, Bytes child, bool, uint64_t) {
      static_cast<std::vector<std::string>*>(context)->emplace_back(child.data, child.length);
    });
  }

  IOStatus GetChildrenFileAttributes(const std::string& name, const IOOptions&,
                                     std::vector<FileAttributes>* result, IODebugContext*) override {
    result->clear();
    return List(name, result, [](void* context, Bytes child, bool, uint64_t bytes) {
      FileAttributes attributes;
      attributes.name.assign(child.data, child.length);
      attributes.size_bytes = bytes;
      static_cast<std::vector<FileAttributes>*>(context)->push_back(std::move(attributes));
    });
  }

  IOStatus DeleteFile(const std::string& name, const IOOptions&, IODebugContext*) override {
    return Run(name, [&](ErrorText* e) { return Functions().unlink(store_, BytesOf(name), e); });
  }

  IOStatus Truncate(const std::string& name, size_t size, const IOOptions&, IODebugContext*) override {
    std::unique_ptr<Handle> handle;
    IOStatus status = Opened(name, kReadWrite, [&](File file) { handle.reset(new Handle(file, name)); });
    if (!status.ok()) return status;
    status = handle->Run([&](ErrorText* e) { return Functions().truncate(handle->file(), size, e); });
    const IOStatus closed = handle->Close();
    return status.ok() ? closed : status;
  }

  IOStatus CreateDir(const std::string& name, const IOOptions&, IODebugContext*) override {
    return Run(name, [&](ErrorText* e) { return Functions().make_directory(store_, BytesOf(name), e); });
  }

  IOStatus CreateDirIfMissing(const std::string& name, const IOOptions& options, IODebugContext* dbg) override {
    IOStatus status = CreateDir(name, options, dbg);
    bool is_directory = false;
    uint64_t bytes = 0;
    if (status.ok() || !StatusOfPath(name, &is_directory, &bytes).ok()) return status;
    return is_directory ? IOStatus::OK() : IOStatus::IOError(name, "there is a file of that name");
  }

  IOStatus DeleteDir(const std::string& name, const IOOptions&, IODebugContext*) override {
    return Run(name, [&](ErrorText* e) { return Functions().remove_directory(store_, BytesOf(name), e); });
  }

  IOStatus GetFileSize(const std::string& name, const IOOptions&, uint64_t* size, IODebugContext*) override {
    bool is_directory = false;
    return StatusOfPath(name, &is_directory, size);
  }

  // Files have no times.
  IOStatus GetFileModificationTime(const std::string& name, const IOOptions&, uint64_t* time,
                                   IODebugContext*) override {
    *time = 0;
    return IOStatus::NotSupported(name, "files in the store have no times");
  }

  IOStatus RenameFile(const std::string& from, const std::string& to, const IOOptions&,
                      IODebugContext*) override {
    return Run(from, [&](ErrorText* e) { return Functions().rename(store_, BytesOf(from), BytesOf(to), e); });
  }

  IOStatus AreFilesSame(const std::string& first, const std::string& second, const IOOptions&, bool* result,
                        IODebugContext*) override {
    *result = first == second;
    return IOStatus::OK();
  }

  IOStatus LockFile(const std::string& name, const IOOptions&, FileLock** lock, IODebugContext*) override {
    *lock = nullptr;
    ErrorText error;
    File file = nullptr;
    if (Functions().lock(store_, BytesOf(name), &file, &error)) {
      *lock = new LockOfFile(file, name);
      return IOStatus::OK();
    }
    if (error.kind == kErrorBusy) return IOStatus::IOError("lock " + name, "another database of this process has it");
    return StatusOf(error, name);
  }

  IOStatus UnlockFile(FileLock* lock, const IOOptions&, IODebugContext*) override {
    std::unique_ptr<LockOfFile> owned(static_cast<LockOfFile*>(lock));
    return owned->Close();
  }

  IOStatus GetTestDirectory(const IOOptions& options, std::string* path, IODebugContext* dbg) override {
    *path = "/rocksdbtest";
    return CreateDirIfMissing(*path, options, dbg);
  }

  IOStatus GetAbsolutePath(const std::string& path, const IOOptions&, std::string* result,
                           IODebugContext*) override {
    *result = !path.empty() && path[0] == '/' ? path : "/" + path;
    return IOStatus::OK();
  }

  IOStatus GetFreeSpace(const std::string& name, const IOOptions&, uint64_t* free, IODebugContext*) override {
    return Run(name, [&](ErrorText* e) { return Functions().free_bytes(store_, free, e); });
  }

  IOStatus Poll(std::vector<void*>& reads, size_t) override {
    for (void* read : reads) static_cast<AsyncRead*>(read)->Finish();
    return IOStatus::OK();
  }

  IOStatus AbortIO(std::vector<void*>& reads) override {
    for (void* read : reads) static_cast<AsyncRead*>(read)->Abort();
    return IOStatus::OK();
  }

  IOStatus IsDirectory(const std::string& name, const IOOptions&, bool* result, IODebugContext*) override {
    uint64_t bytes = 0;
    return StatusOfPath(name, result, &bytes);
  }

 private:
  static IOStatus NotFoundOf(IOStatus status) {
    return status.IsPathNotFound() ? IOStatus::NotFound(status.getState()) : status;
  }

  template <typename Call>
  IOStatus Run(const std::string& name, Call call) const {
    ErrorText error;
    return call(&error) ? IOStatus::OK() : StatusOf(error, name);
  }

  template <typename Make>
  IOStatus Opened(const std::string& name, FileOpen how, Make make) const {
    File file = nullptr;
    IOStatus status = Run(name, [&](ErrorText* e) { return Functions().open(store_, BytesOf(name), how, &file, e); });
    if (status.ok()) make(file);
    return status;
  }

  IOStatus StatusOfPath(const std::string& name, bool* is_directory, uint64_t* bytes) const {
    return Run(name,
               [&](ErrorText* e) { return Functions().status(store_, BytesOf(name), is_directory, bytes, e); });
  }

  IOStatus List(const std::string& name, void* context, ListCallback callback) const {
    return NotFoundOf(
        Run(name, [&](ErrorText* e) { return Functions().list(store_, BytesOf(name), callback, context, e); }));
  }

  const std::shared_ptr<OpenStore> open_;
  const Store store_;
  const std::string uri_;
};

// RocksDB makes an InvalidArgument of whatever fails in a factory: the text begins with the kind.
std::string MessageOf(const ErrorText& error) {
  switch (error.kind) {
    case kErrorCorruption:
      return std::string("Corruption: ") + error.text;
    case kErrorIo:
      return std::string("IO error: ") + error.text;
    default:
      return error.text;
  }
}

FileSystem* Open(const std::string& uri, std::unique_ptr<FileSystem>* guard, std::string* message) {
  ErrorText error;
  Store store = nullptr;
  if (!Functions().store_open(Functions().definition, BytesOf(uri), &store, &error)) {
    *message = MessageOf(error);
    return nullptr;
  }
  guard->reset(new RingboltFileSystem(std::make_shared<OpenStore>(store), uri));
  return guard->get();
}

// Registers the file system when the library is loaded, and closes what is open when the process exits.
class Registration {
 public:
  Registration() {
    const std::string built = std::to_string(ROCKSDB_MAJOR) + "." + std::to_string(ROCKSDB_MINOR);
    const std::string loaded = GetRocksVersionAsString(false);
    if (built != loaded) {
      fprintf(stderr, "ringbolt: built for RocksDB %s, but this program has %s: run ./x plugin rocksdb with its headers\n",
              built.c_str(), loaded.c_str());
      return;
    }
    if (Functions().layout != kLayout) {
      fprintf(stderr, "ringbolt: the parts of the library do not belong together: run ./x plugin rocksdb\n");
      return;
    }
    is_registered_ = true;
    ObjectLibrary::Default()->AddFactory<FileSystem>(
        ObjectLibrary::PatternEntry("ringbolt", false).AddSeparator("://", false), Open);
  }

  ~Registration() {
    if (is_registered_) Functions().close_all(Functions().definition);
  }

 private:
  bool is_registered_ = false;
};

const Registration registration;

}  // namespace
