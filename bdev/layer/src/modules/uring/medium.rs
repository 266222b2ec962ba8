//! What a file or block device is kept in: memory of the machine, or a device.
//!
//! File systems in memory are known by their magic numbers, RAM disks by their drivers. Loop devices have the medium of
//! their files, and devices of the device mapper or of md the weakest of theirs. All else counts as a disk, also what this
//! machine cannot see: a disk of a hypervisor, an export over a network, file systems without a device of their own.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::Durability;

/// `statfs(2)`: file systems that have everything in memory.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Names under which drivers of RAM disks register their major numbers: brd, zram and null_blk.
const RAM_DRIVERS: [&str; 3] = ["ramdisk", "zram", "nullb"];

/// Devices on top of each other that are followed: the kernel has a limit of its own for files, and none for names.
const LEVELS_MAX: u32 = 16;
/// Devices below one that are looked at.
const SLAVES_MAX: usize = 256;
/// Bytes of a file of the kernel that are read.
const ATTRIBUTE_BYTES_MAX: u64 = 64 << 10;

/// Where the kernel describes block devices.
struct KernelView<'a> {
    /// Directory of devices by `MAJOR:MINOR`.
    devices: &'a Path,
    /// Major numbers and their drivers, as in `/proc/devices`.
    drivers: &'a Path,
}

/// What the contents of an open file or block device survive.
pub(crate) fn durability_of(file: &File) -> Durability {
    let view = KernelView { devices: Path::new("/sys/dev/block"), drivers: Path::new("/proc/devices") };
    view.of_open(file).unwrap_or(Durability::Disk)
}

impl KernelView<'_> {
    fn of_open(&self, file: &File) -> io::Result<Durability> {
        let metadata = file.metadata()?;
        if metadata.file_type().is_block_device() {
            return Ok(self.of_device(metadata.rdev(), LEVELS_MAX));
        }
        let magic = rustix::fs::fstatfs(file)?.f_type as u64;
        Ok(self.of_file(magic, metadata.dev(), LEVELS_MAX))
    }

    /// That of a file on the file system with this magic number and this device.
    fn of_file(&self, magic: u64, device: u64, levels: u32) -> Durability {
        // The field is 32 bits wide on some architectures, and signed.
        if [TMPFS_MAGIC, RAMFS_MAGIC, HUGETLBFS_MAGIC].contains(&(magic & 0xffff_ffff)) {
            return Durability::Memory;
        }
        self.of_device(device, levels)
    }

    fn of_device(&self, device: u64, levels: u32) -> Durability {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let entry = self.devices.join(format!("{major}:{minor}"));
        self.of_entry(&entry, levels).unwrap_or(Durability::Disk)
    }

    /// That of the device with this directory; `None` if the kernel does not say.
    fn of_entry(&self, entry: &Path, levels: u32) -> Option<Durability> {
        let levels = levels.checked_sub(1)?;
        let entry = entry.canonicalize().ok()?;
        if entry.join("partition").exists() {
            return self.of_entry(entry.parent()?, levels);
        }
        let number = attribute(&entry.join("dev"))?;
        let major = number.split(':').next()?;
        if self.is_ram_driver(major) {
            return Some(Durability::Memory);
        }
        if let Some(backing) = attribute(&entry.join("loop/backing_file")) {
            return self.of_backing_file(&backing, levels);
        }
        let slaves = fs::read_dir(entry.join("slaves")).ok()?;
        let below = slaves.take(SLAVES_MAX).filter_map(|slave| self.of_entry(&slave.ok()?.path(), levels));
        below.min()
    }

    /// That of the file of a loop device.
    fn of_backing_file(&self, path: &str, levels: u32) -> Option<Durability> {
        let Ok(metadata) = fs::metadata(path) else {
            // A file without a name ends with the loop device.
            return path.ends_with(" (deleted)").then_some(Durability::Memory);
        };
        if metadata.file_type().is_block_device() {
            return Some(self.of_device(metadata.rdev(), levels));
        }
        let magic = rustix::fs::statfs(path).ok()?.f_type as u64;
        Some(self.of_file(magic, metadata.dev(), levels))
    }

    /// Whether the block devices with this major number are RAM disks.
    fn is_ram_driver(&self, major: &str) -> bool {
        let Some(drivers) = attribute(self.drivers) else { return false };
        let blocks = drivers.lines().skip_while(|line| !line.starts_with("Block devices:"));
        let mut of_major = blocks.filter_map(|line| line.trim().split_once(' '));
        of_major.any(|(number, name)| number == major && RAM_DRIVERS.contains(&name))
    }
}

/// The contents of a file of the kernel, without the space around them.
fn attribute(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(ATTRIBUTE_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text.trim().to_string())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;

    use super::*;

    const EXT4_MAGIC: u64 = 0xef53;

    /// A description of block devices.
    struct FakeKernel(PathBuf);

    impl FakeKernel {
        fn new(name: &str) -> FakeKernel {
            let root = std::env::temp_dir().join(format!("ringbolt-medium-{}-{name}", std::process::id()));
            fs::create_dir_all(root.join("devices")).unwrap();
            let drivers = "Character devices:\n  1 mem\n 10 zram\n\nBlock devices:\n  1 ramdisk\n  7 loop\n  8 sd\n\
                           251 nullb\n252 zram\n253 device-mapper\n259 blkext\n";
            fs::write(root.join("drivers"), drivers).unwrap();
            FakeKernel(root)
        }

        fn add(&self, number: &str) -> PathBuf {
            let entry = self.0.join("devices").join(number);
            fs::create_dir_all(entry.join("slaves")).unwrap();
            fs::write(entry.join("dev"), format!("{number}\n")).unwrap();
            entry
        }

        fn add_loop(&self, number: &str, backing: &str) {
            let folder = self.add(number).join("loop");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("backing_file"), format!("{backing}\n")).unwrap();
        }

        fn add_on(&self, number: &str, slaves: &[&str]) {
            let entry = self.add(number);
            for slave in slaves {
                let target = self.0.join("devices").join(slave);
                std::os::unix::fs::symlink(target, entry.join("slaves").join(slave)).unwrap();
            }
        }

        fn file(&self, magic: u64, (major, minor): (u32, u32)) -> Durability {
            let (devices, drivers) = (&*self.0.join("devices"), &*self.0.join("drivers"));
            let view = KernelView { devices, drivers };
            view.of_file(magic, rustix::fs::makedev(major, minor), LEVELS_MAX)
        }

        fn device(&self, major: u32, minor: u32) -> Durability {
            self.file(EXT4_MAGIC, (major, minor))
        }
    }

    impl Drop for FakeKernel {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn memfd() -> File {
        rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
    }

    #[test]
    fn a_file_in_memory_is_memory() {
        assert_eq!(durability_of(&memfd()), Durability::Memory);
        let kernel = FakeKernel::new("file");
        kernel.add("8:0");
        for (magic, expected) in [
            (TMPFS_MAGIC, Durability::Memory),
            (RAMFS_MAGIC, Durability::Memory),
            (HUGETLBFS_MAGIC, Durability::Memory),
            (RAMFS_MAGIC | 0xffff_ffff_0000_0000, Durability::Memory),
            (EXT4_MAGIC, Durability::Disk),
        ] {
            assert_eq!(kernel.file(magic, (8, 0)), expected, "{magic:x}");
        }
    }

    #[test]
    fn ram_disks_and_their_partitions_are_memory() {
        let kernel = FakeKernel::new("ram");
        for (number, major, minor, expected) in [
            ("1:3", 1, 3, Durability::Memory),
            ("252:0", 252, 0, Durability::Memory),
            ("251:1", 251, 1, Durability::Memory),
            // The number of a character device's driver means nothing here.
            ("10:0", 10, 0, Durability::Disk),
            ("8:16", 8, 16, Durability::Disk),
        ] {
            kernel.add(number);
            assert_eq!(kernel.device(major, minor), expected, "{number}");
        }
        assert_eq!(kernel.device(8, 99), Durability::Disk, "the kernel does not describe it");
        // The directory of a partition is in that of its disk, and its number is one of another driver.
        let partition = kernel.0.join("devices/251:1/part");
        fs::create_dir_all(&partition).unwrap();
        fs::write(partition.join("partition"), "1\n").unwrap();
        fs::write(partition.join("dev"), "259:4\n").unwrap();
        std::os::unix::fs::symlink(&partition, kernel.0.join("devices/259:4")).unwrap();
        assert_eq!(kernel.device(259, 4), Durability::Memory);
    }

    #[test]
    fn a_loop_device_has_the_medium_of_its_file() {
        let kernel = FakeKernel::new("loop");
        let file = memfd();
        kernel.add_loop("7:0", &format!("/proc/self/fd/{}", file.as_raw_fd()));
        kernel.add_loop("7:1", "/nowhere/gone (deleted)");
        kernel.add_loop("7:2", "/nowhere/out-of-sight");
        assert_eq!(kernel.device(7, 0), Durability::Memory);
        assert_eq!(kernel.device(7, 1), Durability::Memory);
        assert_eq!(kernel.device(7, 2), Durability::Disk);
    }

    #[test]
    fn a_mapped_device_has_the_weakest_of_those_below() {
        let kernel = FakeKernel::new("mapped");
        for number in ["8:0", "8:16", "252:0"] {
            kernel.add(number);
        }
        kernel.add_on("253:0", &["8:0", "8:16"]);
        kernel.add_on("253:1", &["8:0", "252:0"]);
        kernel.add_on("253:2", &["253:1"]);
        assert_eq!(kernel.device(253, 0), Durability::Disk);
        assert_eq!(kernel.device(253, 1), Durability::Memory);
        assert_eq!(kernel.device(253, 2), Durability::Memory);
        // Of a loop device it is known that it is no memory, where a disk says nothing.
        kernel.add_loop("7:0", "/proc/version");
        kernel.add_on("253:5", &["7:0", "252:0"]);
        assert_eq!([kernel.device(7, 0), kernel.device(253, 5)], [Durability::Disk, Durability::Memory]);
        // Devices on top of each other in a circle, which the kernel never has.
        kernel.add_on("253:3", &["253:4"]);
        kernel.add_on("253:4", &["253:3"]);
        assert_eq!(kernel.device(253, 3), Durability::Disk);
    }
}
