//! The UUID of a file or disk, which stays the same for as long as its data does.
//!
//! Hosts know a namespace by its UUID: another one after a restart is another disk, and a mounted file system
//! on it fails. A file keeps its UUID in the extended attribute [`ATTRIBUTE`], with its inode number and
//! birth time, so that a copy that took the attribute along gets an identity of its own. A disk's UUID is
//! derived from its World Wide Name, and a loop device has that of its file. Neither depends on a path. See
//! `docs/formats/identity.md`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use os::device::{LoopBackingFile, loop_file};
use rustix::fs::{AtFlags, StatxFlags, XattrFlags};
use uuid::Uuid;

/// Name of a file's extended attribute.
const ATTRIBUTE: &str = "user.ringbolt.identity";
/// Version of its value.
const VERSION: &str = "1";
/// Longest value: version, UUID, inode number and birth time.
const VALUE_BYTES_MAX: usize = 128;
/// Namespace of UUIDs (version 5) that are derived from a disk's World Wide Name.
const WWID_NAMESPACE: Uuid = Uuid::from_u128(0x0c3d_1b7c_b99d_4593_92d8_67fb_3b56_acfe);

/// The UUID of a device, and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceIdentity {
    /// `None` for a random one.
    pub(crate) uuid: Option<Uuid>,
    pub(crate) source: IdentitySource,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum IdentitySource {
    /// The caller gave it.
    Given,
    /// Stored with the file.
    File,
    /// Derived from the disk's World Wide Name.
    Disk,
    /// It changes when the device is created again, for this reason.
    Unstable(String),
}

impl IdentitySource {
    /// One word, as `bdev_get_bdevs` shows it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            IdentitySource::Given => "given",
            IdentitySource::File => "file",
            IdentitySource::Disk => "disk",
            IdentitySource::Unstable(_) => "random",
        }
    }
}

/// Finds or makes the identity of an opened file or block device.
pub(crate) fn identify(file: &File, path: &Path, readonly: bool) -> DeviceIdentity {
    let identified = match file.metadata() {
        Ok(metadata) if metadata.file_type().is_block_device() => of_disk(file, metadata.rdev(), readonly),
        Ok(metadata) if metadata.is_file() => of_file(file, path, readonly),
        Ok(_) => Err("it is no file and no block device".into()),
        Err(error) => Err(error.to_string()),
    };
    identified.unwrap_or_else(|reason| {
        log::warn!(
            target: "bdev",
            "{}: the UUID is random and changes with each start, because {reason}; give a uuid to keep it",
            path.display()
        );
        DeviceIdentity { uuid: None, source: IdentitySource::Unstable(reason) }
    })
}

/// What a copy of a file does not share with it: inode number and time of birth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileInstance {
    inode: u64,
    born_ns: i128,
}

impl FileInstance {
    fn of(file: &File) -> io::Result<FileInstance> {
        let wanted = StatxFlags::INO | StatxFlags::BTIME;
        let found = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted)?;
        // File systems without a time of birth leave it at 0.
        let has_birth = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
        let born_ns =
            i128::from(found.stx_btime.tv_sec) * 1_000_000_000 + i128::from(found.stx_btime.tv_nsec);
        Ok(FileInstance { inode: found.stx_ino, born_ns: if has_birth { born_ns } else { 0 } })
    }
}

fn of_file(file: &File, path: &Path, readonly: bool) -> Result<DeviceIdentity, String> {
    let instance = FileInstance::of(file).map_err(|error| format!("statx failed ({error})"))?;
    let stored = read_attribute(file);
    if let Some((uuid, owner)) = stored {
        if owner == instance {
            return Ok(DeviceIdentity { uuid: Some(uuid), source: IdentitySource::File });
        }
        log::warn!(
            target: "bdev",
            "{} is a copy of volume {uuid} and gets an identity of its own; to keep the old one, give uuid {uuid}",
            path.display()
        );
    }
    if readonly {
        return Err("it is opened read-only and has none stored".into());
    }
    let uuid = Uuid::new_v4();
    let value = encode(uuid, instance);
    let written = rustix::fs::fsetxattr(file, ATTRIBUTE, value.as_bytes(), XattrFlags::empty());
    written.map_err(|errno| format!("the file system cannot store it with the file ({errno})"))?;
    // Hosts learn the UUID next; it must not change after a power loss.
    file.sync_all().map_err(|error| format!("it could not be synced ({error})"))?;
    Ok(DeviceIdentity { uuid: Some(uuid), source: IdentitySource::File })
}

fn encode(uuid: Uuid, instance: FileInstance) -> String {
    format!("{VERSION} {uuid} {} {}", instance.inode, instance.born_ns)
}

/// Decodes the attribute's value; `None` if it is of another version or damaged.
fn decode(value: &str) -> Option<(Uuid, FileInstance)> {
    let mut words = value.split(' ');
    if words.next()? != VERSION {
        return None;
    }
    let uuid = Uuid::try_parse(words.next()?).ok().filter(|uuid| !uuid.is_nil())?;
    let instance = FileInstance { inode: words.next()?.parse().ok()?, born_ns: words.next()?.parse().ok()? };
    words.next().is_none().then_some((uuid, instance))
}

fn read_attribute(file: &File) -> Option<(Uuid, FileInstance)> {
    let mut value = [0; VALUE_BYTES_MAX];
    let length = rustix::fs::fgetxattr(file, ATTRIBUTE, &mut value[..]).ok()?;
    decode(std::str::from_utf8(&value[..length]).ok()?)
}

/// The UUID of a disk with this device number.
fn of_disk(disk: &File, device: u64, readonly: bool) -> Result<DeviceIdentity, String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let directory = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    if let Ok(path) = std::fs::read_to_string(directory.join("loop/backing_file")) {
        let path = Path::new(path.trim_end_matches('\n'));
        let behind = loop_file(disk).map_err(|error| format!("its file is not known ({error})"))?;
        return of_file(&open_loop_file(path, behind)?, path, readonly);
    }
    let name = world_wide_name(&directory).ok_or("the disk reports no World Wide Name or serial number")?;
    let uuid = Uuid::new_v5(&WWID_NAMESPACE, name.as_bytes());
    Ok(DeviceIdentity { uuid: Some(uuid), source: IdentitySource::Disk })
}

/// Opens the file behind a loop device. The path is what the kernel had when that was set up; whether it
/// still leads to the file is checked, and whether the device is all of it.
fn open_loop_file(path: &Path, behind: LoopBackingFile) -> Result<File, String> {
    if behind.offset != 0 || behind.size_limit != 0 {
        return Err("the loop device is a part of its file".to_string());
    }
    let missing = |error: io::Error| format!("the file behind the loop device is not found ({error})");
    // Without waiting, should another file be there now.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(missing)?;
    let found = file.metadata().map_err(missing)?;
    if !found.is_file() || (found.dev(), found.ino()) != (behind.device, behind.inode) {
        return Err(format!("{} is not the file behind the loop device any more", path.display()));
    }
    Ok(file)
}

/// The World Wide Name of a disk or partition by its directory in sysfs, from what the kernel knows: that of
/// NVMe, of SCSI, the UUID of the device mapper or of an array of md, or a virtio disk's serial number. A
/// partition has its disk's and its own number.
fn world_wide_name(directory: &Path) -> Option<String> {
    let text = |name: &str| {
        let text = std::fs::read_to_string(directory.join(name)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_string())
    };
    if let Some(partition) = text("partition") {
        let disk = std::fs::canonicalize(directory).ok()?;
        return Some(format!("{}-part{partition}", world_wide_name(disk.parent()?)?));
    }
    let own = text("wwid").or_else(|| text("device/wwid"));
    // Arrays without metadata have none, or zeroes. It is kept on their disks, not derived from their names.
    let array =
        || text("md/uuid").filter(|uuid| uuid.bytes().any(|byte| byte.is_ascii_hexdigit() && byte != b'0'));
    own.or_else(|| Some(format!("dm-{}", text("dm/uuid")?)))
        .or_else(|| Some(format!("md-{}", array()?)))
        .or_else(|| Some(format!("serial-{}", text("serial")?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_they_were_written_and_others_are_not() {
        let uuid = Uuid::from_u128(7);
        let instance = FileInstance { inode: 12, born_ns: 1_700_000_000_123_456_789 };
        let value = encode(uuid, instance);
        assert_eq!(value, "1 00000000-0000-0000-0000-000000000007 12 1700000000123456789");
        assert!(value.len() <= VALUE_BYTES_MAX);
        assert_eq!(decode(&value), Some((uuid, instance)));
        for damaged in [
            "",
            "1",
            "2 00000000-0000-0000-0000-000000000007 12 17",
            "1 00000000-0000-0000-0000-000000000000 12 17",
            "1 7 12 17",
            "1 00000000-0000-0000-0000-000000000007 x 17",
            "1 00000000-0000-0000-0000-000000000007 12",
            "1 00000000-0000-0000-0000-000000000007 12 17 1",
        ] {
            assert_eq!(decode(damaged), None, "{damaged:?}");
        }
    }

    #[test]
    fn the_file_behind_a_loop_device_is_the_one_that_the_kernel_names() {
        let path = std::env::temp_dir().join(format!("ringbolt-loop-file-{}", std::process::id()));
        std::fs::write(&path, "data").unwrap();
        let found = std::fs::metadata(&path).unwrap();
        let behind = LoopBackingFile { device: found.dev(), inode: found.ino(), offset: 0, size_limit: 0 };
        assert_eq!(open_loop_file(&path, behind).unwrap().metadata().unwrap().ino(), found.ino());
        let refused = |behind| open_loop_file(&path, behind).unwrap_err();
        for part in
            [LoopBackingFile { offset: 512, ..behind }, LoopBackingFile { size_limit: 4096, ..behind }]
        {
            assert_eq!(refused(part), "the loop device is a part of its file");
        }
        for other in
            [LoopBackingFile { inode: found.ino() + 1, ..behind }, LoopBackingFile { device: 1, ..behind }]
        {
            assert!(refused(other).ends_with("is not the file behind the loop device any more"));
        }
        std::fs::remove_file(&path).unwrap();
        assert!(refused(behind).starts_with("the file behind the loop device is not found"));
    }

    #[test]
    fn a_loop_device_has_the_uuid_of_its_file() {
        let path = std::env::temp_dir().join(format!("ringbolt-loop-uuid-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let of_its_own = identify(&file, &path, false);
        let losetup = |arguments: &[&str]| {
            let output = std::process::Command::new("losetup").args(arguments).arg(&path).output().ok()?;
            let device = String::from_utf8(output.stdout).ok()?.trim().to_string();
            output.status.success().then_some(device)
        };
        let devices = [&["--find", "--show"][..], &["--find", "--show", "--offset=4096"]].map(losetup);
        let [Some(whole), Some(part)] = &devices else {
            std::fs::remove_file(&path).unwrap();
            return eprintln!("SKIPPED: losetup sets up no loop device here");
        };
        let found =
            [whole, part].map(|device| identify(&File::open(device).unwrap(), Path::new(device), false));
        for device in devices.iter().flatten() {
            assert!(
                std::process::Command::new("losetup").args(["--detach", device]).status().unwrap().success()
            );
        }
        std::fs::remove_file(&path).unwrap();
        if of_its_own.uuid.is_none() {
            return eprintln!("SKIPPED: the temporary directory keeps no extended attributes");
        }
        assert_eq!(found[0], of_its_own);
        let reason = "the loop device is a part of its file".to_string();
        assert_eq!(found[1], DeviceIdentity { uuid: None, source: IdentitySource::Unstable(reason) });
    }

    #[test]
    fn a_disk_is_known_by_what_the_kernel_knows_of_it() {
        let root = std::env::temp_dir().join(format!("ringbolt-wwid-{}", std::process::id()));
        let disk = |name: &str, files: &[(&str, &str)]| {
            let directory = root.join(name);
            for (file, text) in files {
                let path = directory.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            directory
        };
        let nvme = disk("nvme0n1", &[("wwid", "eui.0011\n")]);
        assert_eq!(world_wide_name(&nvme).as_deref(), Some("eui.0011"));
        let part = disk("nvme0n1/nvme0n1p2", &[("partition", "2\n")]);
        assert_eq!(world_wide_name(&part).as_deref(), Some("eui.0011-part2"));
        let scsi = disk("sda", &[("device/wwid", "naa.5000\n")]);
        assert_eq!(world_wide_name(&scsi).as_deref(), Some("naa.5000"));
        let lvm = disk("dm-0", &[("dm/uuid", "LVM-abc\n")]);
        assert_eq!(world_wide_name(&lvm).as_deref(), Some("dm-LVM-abc"));
        let array = disk("md0", &[("md/uuid", "3f1a5c2e-0000-4a4b-9c9d-000000000001\n")]);
        assert_eq!(world_wide_name(&array).as_deref(), Some("md-3f1a5c2e-0000-4a4b-9c9d-000000000001"));
        let part = disk("md0/md0p1", &[("partition", "1\n")]);
        assert_eq!(world_wide_name(&part).as_deref(), Some("md-3f1a5c2e-0000-4a4b-9c9d-000000000001-part1"));
        let bare = disk("md1", &[("md/uuid", "00000000-0000-0000-0000-000000000000\n")]);
        assert_eq!(world_wide_name(&bare), None, "an array without metadata");
        let virtio = disk("vda", &[("serial", "S1")]);
        assert_eq!(world_wide_name(&virtio).as_deref(), Some("serial-S1"));
        let nameless = disk("vdb", &[("serial", ""), ("size", "8")]);
        assert_eq!(world_wide_name(&nameless), None);
        std::fs::remove_dir_all(root).unwrap();
    }
}
