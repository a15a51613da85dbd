// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "support/memory_file_system.h"
#include "support/temporary_directory.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using Kind = FileSystem::EntryKind;
using espalier::testing::MemoryFileSystem;
using espalier::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

void WriteText(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string ReadText(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

// The message with which opening is refused as kIo; fails the test when it is not.
std::string OpenRefusal(const fs::path& path) {
  const auto file = PosixFileSystem().Open(path);
  if (file) {
    ADD_FAILURE() << path << " was opened";
    return "";
  }
  EXPECT_EQ(file.error().code(), StatusCode::kIo);
  return file.error().message();
}

void MakeSocket(const fs::path& path) {
  const int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.native().size(), sizeof address.sun_path);
  path.native().copy(address.sun_path, path.native().size());
  ASSERT_EQ(bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  close(descriptor);
}

TEST(FileTest, ReadsAnyPartOfAFile) {
  const TemporaryDirectory directory;
  WriteText(directory / "a", "0123456789");
  const auto file = PosixFileSystem().Open(directory / "a");
  ASSERT_TRUE(file) << file.error().message();
  EXPECT_EQ((*file)->size_bytes(), 10u);
  EXPECT_EQ((*file)->path(), directory / "a");
  std::string text(4, ' ');
  const auto target = std::as_writable_bytes(std::span(text));
  ASSERT_TRUE((*file)->ReadAt(3, target));
  EXPECT_EQ(text, "3456");
  EXPECT_EQ((*file)->ReadSome(10, target), 0u);
  EXPECT_EQ((*file)->ReadSome(UINT64_MAX, target), 0u);
  EXPECT_EQ((*file)->ReadSome(8, target), 2u);
  EXPECT_TRUE((*file)->ReadAt(10, {}));
  const Result<void> past = (*file)->ReadAt(8, target);
  ASSERT_FALSE(past);
  EXPECT_EQ(past.error().code(), StatusCode::kIo);
  EXPECT_THAT(past.error().message(), AllOf(HasSubstr("/a'"), HasSubstr("file ended at byte 10, needed 12")));
}

TEST(FileTest, SeesThroughLinks) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "blobs");
  fs::create_directory(directory / "snapshot");
  WriteText(directory / "blobs/3f2a", "blob");
  // As the hub cache does it: a relative link to a blob whose name has no suffix.
  fs::create_symlink("../blobs/3f2a", directory / "snapshot/model.safetensors");
  fs::create_symlink("model.safetensors", directory / "snapshot/again");
  for (const char* name : {"snapshot/model.safetensors", "snapshot/again"}) {
    EXPECT_EQ(PosixFileSystem().Kind(directory / name), Kind::kRegular);
    const auto file = PosixFileSystem().Open(directory / name);
    ASSERT_TRUE(file) << file.error().message();
    EXPECT_EQ(ReadTextFile(**file, 100), "blob");
  }
}

TEST(FileTest, TellsApartWhatCannotBeOpened) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "folder");
  fs::create_directory_symlink("folder", directory / "folder-link");
  ASSERT_EQ(mkfifo((directory / "fifo").c_str(), 0600), 0);
  MakeSocket(directory / "socket");
  WriteText(directory / "file", "");
  fs::create_symlink("nowhere", directory / "dangling");
  fs::create_symlink("loop", directory / "loop");

  const struct {
    const char* name;
    Kind kind;
    const char* message;
  } cases[] = {
      {"folder", Kind::kDirectory, "is a directory"},
      {"folder-link", Kind::kDirectory, "is a directory"},
      {"fifo", Kind::kOther, "is a FIFO"},
      {"socket", Kind::kOther, "is a socket"},
      {"dangling", Kind::kDanglingLink, "is a dangling link: its target 'nowhere' does not exist"},
      {"loop", Kind::kDanglingLink, "is a dangling link: its target 'loop' leads back to a link"},
      {"missing", Kind::kAbsent, "does not exist"},
      {"missing/file", Kind::kAbsent, "does not exist"},
      {"file/inside", Kind::kAbsent, "does not exist"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(PosixFileSystem().Kind(directory / c.name), c.kind) << c.name;
    EXPECT_THAT(OpenRefusal(directory / c.name), AllOf(HasSubstr(c.name), HasSubstr(c.message)));
  }
  EXPECT_THAT(OpenRefusal("/dev/zero"), HasSubstr("is a character device"));
  EXPECT_THAT(OpenRefusal(""), HasSubstr("does not exist"));
  EXPECT_THAT(OpenRefusal(directory / std::string(5000, 'n')), HasSubstr("cannot be opened"));
}

TEST(FileTest, FifoDoesNotBlockOpening) {
  const TemporaryDirectory directory;
  ASSERT_EQ(mkfifo((directory / "model.safetensors").c_str(), 0600), 0);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(OpenRefusal(directory / "model.safetensors"), HasSubstr("FIFO"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(FileTest, PathWithNulIsRefused) {
  const TemporaryDirectory directory;
  WriteText(directory / "a", "x");
  const fs::path path = (directory / "a").native() + std::string("\0.safetensors", 13);
  EXPECT_EQ(PosixFileSystem().Kind(path), Kind::kAbsent);
  EXPECT_THAT(OpenRefusal(path), HasSubstr("NUL"));
  EXPECT_FALSE(PosixFileSystem().List(path));
  EXPECT_FALSE(AtomicFile::Create(path));
}

TEST(FileTest, ListIsOrderedAndComplete) {
  const TemporaryDirectory directory;
  for (const char* name : {"b", "a", ".hidden", "C"}) WriteText(directory / name, "");
  fs::create_directory(directory / "sub");
  fs::create_symlink("nowhere", directory / "dangling");
  const auto names = PosixFileSystem().List(directory.path());
  ASSERT_TRUE(names) << names.error().message();
  EXPECT_THAT(*names, ElementsAre(".hidden", "C", "a", "b", "dangling", "sub"));
  for (const char* name : {"a", "missing", "dangling"}) {
    const auto refused = PosixFileSystem().List(directory / name);
    ASSERT_FALSE(refused) << name;
    EXPECT_EQ(refused.error().code(), StatusCode::kIo);
    EXPECT_THAT(refused.error().message(), HasSubstr(name));
  }
}

TEST(FileTest, TextFileOverTheLimitIsAFormatError) {
  const TemporaryDirectory directory;
  WriteText(directory / "a", "12345");
  const auto file = PosixFileSystem().Open(directory / "a");
  ASSERT_TRUE(file);
  EXPECT_EQ(ReadTextFile(**file, 5), "12345");
  const auto refused = ReadTextFile(**file, 4);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), StatusCode::kFormat);
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("5 bytes"), HasSubstr("at most 4")));
}

TEST(FileTest, FileCutAfterOpeningIsAnIoError) {
  const TemporaryDirectory directory;
  WriteText(directory / "a", std::string(100, 'a'));
  const auto file = PosixFileSystem().Open(directory / "a");
  ASSERT_TRUE(file);
  fs::resize_file(directory / "a", 30);
  const auto text = ReadTextFile(**file, 1000);
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error().code(), StatusCode::kIo);
  EXPECT_THAT(text.error().message(), HasSubstr("file ended at byte 30, needed 100"));
}

TEST(FileTest, ShortReadsArePutTogether) {
  MemoryFileSystem files;
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes += static_cast<char>(i * 7);
  files.Write("/d/a", bytes);
  for (const size_t most : {1, 2, 7, 999}) {
    files.SetFaults("/d/a", {.max_bytes_per_read = most, .fails_at = {}, .ends_at = {}});
    const auto file = files.Open("/d/a");
    ASSERT_TRUE(file);
    EXPECT_EQ(ReadTextFile(**file, 1000), bytes) << most;
  }
}

TEST(FileTest, ReadErrorsComeThrough) {
  MemoryFileSystem files;
  files.Write("/d/a", std::string(100, 'a'));
  files.SetFaults("/d/a", {.max_bytes_per_read = 0, .fails_at = 60, .ends_at = {}});
  const auto file = files.Open("/d/a");
  ASSERT_TRUE(file);
  std::string text(60, ' ');
  EXPECT_TRUE((*file)->ReadAt(0, std::as_writable_bytes(std::span(text))));
  EXPECT_EQ(text, std::string(60, 'a'));
  const Result<void> refused = (*file)->ReadAt(1, std::as_writable_bytes(std::span(text)));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), StatusCode::kIo);
  EXPECT_THAT(refused.error().message(), HasSubstr("on order"));
}

TEST(FileTest, ManyThreadsReadOneFile) {
  const TemporaryDirectory directory;
  std::string bytes;
  for (int i = 0; i < 100000; ++i) bytes += static_cast<char>(i * 31 >> 3);
  WriteText(directory / "a", bytes);
  const auto file = PosixFileSystem().Open(directory / "a");
  ASSERT_TRUE(file);
  std::vector<std::string> parts(8, std::string(12500, ' '));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < parts.size(); ++i) {
    threads.emplace_back([&, i] {
      for (size_t k = 0; k < 12500; k += 100) {
        EXPECT_TRUE(
            (*file)->ReadAt(i * 12500 + k, std::as_writable_bytes(std::span(parts[i]).subspan(k, 100))));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string whole;
  for (const std::string& part : parts) whole += part;
  EXPECT_TRUE(whole == bytes);
}

TEST(AtomicFileTest, AppearsOnlyWhenCommitted) {
  const TemporaryDirectory directory;
  WriteText(directory / "out", "old");
  {
    auto file = AtomicFile::Create(directory / "out");
    ASSERT_TRUE(file) << file.error().message();
    ASSERT_TRUE(file->Append(Bytes("new ")));
    ASSERT_TRUE(file->Append(Bytes("text")));
    EXPECT_EQ(ReadText(directory / "out"), "old");
    const auto names = PosixFileSystem().List(directory.path());
    ASSERT_TRUE(names);
    ASSERT_EQ(names->size(), 2u);
    EXPECT_THAT((*names)[0], AllOf(StartsWith(".out."), ::testing::EndsWith(".tmp")));
    AtomicFile moved = std::move(*file);
    ASSERT_TRUE(moved.Commit());
  }
  EXPECT_EQ(ReadText(directory / "out"), "new text");
  EXPECT_THAT(*PosixFileSystem().List(directory.path()), ElementsAre("out"));
}

TEST(AtomicFileTest, LeavesNothingWithoutCommit) {
  const TemporaryDirectory directory;
  {
    auto file = AtomicFile::Create(directory / "out");
    ASSERT_TRUE(file);
    ASSERT_TRUE(file->Append(Bytes("text")));
    const AtomicFile moved = std::move(*file);
  }
  EXPECT_THAT(*PosixFileSystem().List(directory.path()), IsEmpty());
}

TEST(AtomicFileTest, ModeFollowsTheUmask) {
  const TemporaryDirectory directory;
  const mode_t before = umask(0027);
  auto file = AtomicFile::Create(directory / "out");
  umask(before);
  ASSERT_TRUE(file);
  ASSERT_TRUE(file->Commit());
  struct stat info = {};
  ASSERT_EQ(stat((directory / "out").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, mode_t{0640});
}

TEST(AtomicFileTest, RefusesTargetsThatAreNoFiles) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "folder");
  ASSERT_EQ(mkfifo((directory / "fifo").c_str(), 0600), 0);
  for (const fs::path& path : {directory / "folder", directory / "fifo", fs::path("/dev/null"),
                               directory / "missing/out", directory / "folder/", fs::path()}) {
    const auto file = AtomicFile::Create(path);
    ASSERT_FALSE(file) << path;
    EXPECT_EQ(file.error().code(), StatusCode::kIo) << path;
  }
  EXPECT_THAT(*PosixFileSystem().List(directory.path()), ElementsAre("fifo", "folder"));
  EXPECT_THAT(*PosixFileSystem().List(directory / "folder"), IsEmpty());
}

TEST(AtomicFileTest, TakesTheLongestName) {
  const TemporaryDirectory directory;
  const std::string name(255, 'n');
  auto file = AtomicFile::Create(directory / name);
  ASSERT_TRUE(file) << file.error().message();
  ASSERT_TRUE(file->Commit());
  EXPECT_TRUE(fs::exists(directory / name));
}

TEST(AtomicFileTest, CommitIntoAVanishedDirectoryIsAnIoError) {
  const TemporaryDirectory directory;
  auto file = AtomicFile::Create(directory / "out");
  ASSERT_TRUE(file);
  fs::remove_all(directory.path());
  const Result<void> committed = file->Commit();
  ASSERT_FALSE(committed);
  EXPECT_EQ(committed.error().code(), StatusCode::kIo);
}

TEST(MemoryFileSystemTest, ImpliesDirectories) {
  MemoryFileSystem files;
  files.Write("/d/sub/a", "1");
  files.Write("/d/b", "2");
  files.Write("/d.x", "3");
  files.AddEntry("/d/fifo", Kind::kOther);
  files.AddEntry("/d/link", Kind::kDanglingLink);
  EXPECT_EQ(files.Kind("/d"), Kind::kDirectory);
  EXPECT_EQ(files.Kind("/d/"), Kind::kDirectory);
  EXPECT_EQ(files.Kind("/d/sub/../b"), Kind::kRegular);
  EXPECT_EQ(files.Kind("/d/c"), Kind::kAbsent);
  EXPECT_EQ(files.Kind("/d/fifo"), Kind::kOther);
  EXPECT_THAT(*files.List("/d"), ElementsAre("b", "fifo", "link", "sub"));
  for (const char* path : {"/d", "/d/fifo", "/d/link", "/d/c"}) {
    const auto file = files.Open(path);
    ASSERT_FALSE(file) << path;
    EXPECT_EQ(file.error().code(), StatusCode::kIo);
  }
  files.Remove("/d/b");
  EXPECT_EQ(files.Kind("/d/b"), Kind::kAbsent);
}

TEST(MemoryFileSystemTest, SparseFilesReadAsZeros) {
  MemoryFileSystem files;
  files.WriteSparse("/big", "head", 200'000'000'000);
  const auto file = files.Open("/big");
  ASSERT_TRUE(file);
  EXPECT_EQ((*file)->size_bytes(), 200'000'000'000u);
  std::string text(6, 'x');
  ASSERT_TRUE((*file)->ReadAt(2, std::as_writable_bytes(std::span(text))));
  EXPECT_EQ(text, std::string("ad\0\0\0\0", 6));
  ASSERT_TRUE((*file)->ReadAt(199'999'999'994, std::as_writable_bytes(std::span(text))));
  EXPECT_FALSE((*file)->ReadAt(199'999'999'995, std::as_writable_bytes(std::span(text))));
  EXPECT_EQ(files.bytes_read(), 17u);
}

}  // namespace
}  // namespace espalier
