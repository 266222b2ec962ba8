//! The devices under test: block devices, files, loop devices that the lab creates, and bdevs of the generator's by
//! URI.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use random::WyRand;

use crate::host::HostInfo;
use crate::journal::Journal;
use crate::locks::DeviceLocks;
use crate::loops::losetup;
use crate::record::PlannedDevice;

/// Most devices of a run.
pub const DEVICES_MAX: usize = 64;
/// Most loop devices that the lab creates; the largest study has eight devices.
pub const LOOPS_MAX: usize = 8;
/// Smallest device that can be tested, in bytes.
const DEVICE_BYTES_MIN: u64 = 1 << 20;
/// How often another program may take the free loop device first.
const ATTACH_ATTEMPTS_MAX: usize = 16;

/// Why a device cannot be used, in one line that says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeviceSetupError(pub String);

fn refuse<T>(line: impl Into<String>) -> Result<T, DeviceSetupError> {
    Err(DeviceSetupError(line.into()))
}

/// The kind of a device under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A block device that the user names.
    Block,
    /// A file that the user names.
    File,
    /// A loop device over a file; the lab creates and removes both.
    Loop,
    /// A null_blk device of the kernel.
    NullBlk,
    /// A bdev of the generator's, for example `model:…` or `nvme+tcp://…`.
    Uri,
}

impl DeviceKind {
    /// Name in `plan.toml`.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Block => "block",
            DeviceKind::File => "file",
            DeviceKind::Loop => "loop",
            DeviceKind::NullBlk => "null_blk",
            DeviceKind::Uri => "uri",
        }
    }

    /// The kind with this [`DeviceKind::name`].
    pub fn from_name(name: &str) -> Option<DeviceKind> {
        [DeviceKind::Block, DeviceKind::File, DeviceKind::Loop, DeviceKind::NullBlk, DeviceKind::Uri]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

/// One device under test.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Device node, path or URI. Empty for a loop device that does not exist yet.
    pub location: String,
    /// Name in `/sys/block`; none for files and bdevs.
    pub name: Option<String>,
    /// Size to use; 0 if only the generator knows it.
    pub size_bytes: u64,
    /// Whether it may be written to.
    pub writable: bool,
    /// Model, firmware and size, for reports.
    pub described: String,
}

/// The devices that the user requests.
#[derive(Clone, Debug, Default)]
pub struct DeviceRequest {
    /// Device nodes, URIs, or `null_blk`.
    pub devices: Vec<String>,
    /// A file to test instead.
    pub file: Option<PathBuf>,
    /// Devices and files whose data may be destroyed.
    pub destroy: Vec<String>,
    /// Size of each loop device's file.
    pub disk_bytes: u64,
}

impl Device {
    /// The device as `plan.toml` describes it.
    pub fn to_planned(&self) -> PlannedDevice {
        PlannedDevice {
            kind: self.kind.name().to_string(),
            path: self.location.clone(),
            size_bytes: self.size_bytes,
            described: self.described.clone(),
        }
    }

    /// Whether the device still exists.
    pub fn exists(&self, host: &HostInfo) -> bool {
        match (self.kind, &self.name) {
            (DeviceKind::Uri, _) => true,
            (DeviceKind::File, _) => Path::new(&self.location).exists(),
            (_, Some(name)) => {
                host.path(&format!("sys/block/{name}")).exists() && Path::new(&self.location).exists()
            }
            (_, None) => true,
        }
    }

    /// The URI by which the generator's bdev layer opens it.
    pub fn uri(&self) -> String {
        if self.kind == DeviceKind::Uri { self.location.clone() } else { format!("uring:{}", self.location) }
    }
}

/// Resolves a request to devices, without creating or changing anything. If it names no device, the result is `count`
/// loop devices that are still to be created.
///
/// # Errors
/// A device that does not exist, is in use, or is named twice; options that contradict each other.
pub fn resolve(
    wanted: &DeviceRequest,
    host: &HostInfo,
    count: usize,
    root: bool,
) -> Result<Vec<Device>, DeviceSetupError> {
    if !wanted.devices.is_empty() && wanted.file.is_some() {
        return refuse("--device and --file exclude each other");
    }
    if wanted.devices.len() > DEVICES_MAX {
        return refuse(format!("{} devices are too many; at most {DEVICES_MAX}", wanted.devices.len()));
    }
    for named in &wanted.destroy {
        let of_device = wanted.devices.contains(named);
        let of_file = wanted.file.as_deref().is_some_and(|file| file == Path::new(named));
        if !of_device && !of_file {
            return refuse(format!("--destroy-data {named} names no --device or --file of this run"));
        }
    }
    if let Some(path) = &wanted.file {
        return Ok(vec![file(path, wanted)?]);
    }
    if wanted.devices.is_empty() {
        if !root {
            return refuse(
                "only root makes loop devices: run as root, or name a file (--file PATH) or a bdev \
                 (--device null:1g)",
            );
        }
        let described = format!("loop device over a file of {} MiB", wanted.disk_bytes >> 20);
        let device = Device {
            kind: DeviceKind::Loop,
            location: String::new(),
            name: None,
            size_bytes: wanted.disk_bytes,
            writable: true,
            described,
        };
        return Ok(vec![device; count.clamp(1, LOOPS_MAX)]);
    }
    let mut devices = Vec::new();
    for name in &wanted.devices {
        if name == "null_blk" {
            devices.extend(null_blk_devices(host)?);
        } else if is_uri(name) {
            devices.push(Device {
                kind: DeviceKind::Uri,
                location: name.clone(),
                name: None,
                size_bytes: 0,
                writable: true,
                described: format!("bdev {name}"),
            });
        } else {
            devices.push(block(name, wanted, host)?);
        }
    }
    let mut places: Vec<&str> = devices.iter().map(|device| device.location.as_str()).collect();
    places.sort_unstable();
    if let Some(twice) = places.windows(2).find(|pair| pair[0] == pair[1]) {
        return refuse(format!("{} is named twice", twice[0]));
    }
    Ok(devices)
}

fn is_uri(name: &str) -> bool {
    let scheme = name.split_once(':').map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| !scheme.is_empty() && !scheme.contains('/'))
}

fn block(node: &str, wanted: &DeviceRequest, host: &HostInfo) -> Result<Device, DeviceSetupError> {
    let path = Path::new(node);
    let kind = match fs::metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) => return refuse(format!("--device {node}: {error}")),
    };
    if !kind.is_block_device() {
        return refuse(format!("--device {node}: not a block device; use --file for a file"));
    }
    let Some(name) = host.block_name(path) else {
        return refuse(format!("--device {node}: a partition; a scheduler belongs to a whole device"));
    };
    let facts = host.block(&name);
    if !facts.used_by.is_empty() {
        return refuse(format!(
            "--device {node}: in use ({}); nothing is run on it",
            facts.used_by.join(", ")
        ));
    }
    if facts.size_bytes < DEVICE_BYTES_MIN {
        return refuse(format!("--device {node}: {} bytes are too few", facts.size_bytes));
    }
    let writable = wanted.destroy.iter().any(|named| named == node);
    // O_EXCL fails with EBUSY if the kernel itself uses the block device.
    let exclusive = rustix::fs::OFlags::EXCL.bits() as i32;
    let opened = {
        use std::os::unix::fs::OpenOptionsExt;
        OpenOptions::new().read(true).write(writable).custom_flags(exclusive).open(path)
    };
    if let Err(error) = opened {
        return refuse(format!("--device {node}: {error}"));
    }
    // A device without a model, such as a loop device, is described by its name.
    let model = if facts.model.trim().is_empty() { &name } else { &facts.model };
    let described = format!("{model} {} {}", facts.firmware.trim(), format_size(facts.size_bytes));
    Ok(Device {
        kind: DeviceKind::Block,
        location: node.to_string(),
        name: Some(name.clone()),
        size_bytes: facts.size_bytes,
        writable,
        described: described.split_whitespace().collect::<Vec<_>>().join(" "),
    })
}

fn format_size(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

fn file(path: &Path, wanted: &DeviceRequest) -> Result<Device, DeviceSetupError> {
    let shown = path.display();
    let named = wanted.destroy.iter().any(|named| Path::new(named) == path);
    let (size, writable) = match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.len() >= DEVICE_BYTES_MIN => (metadata.len(), named),
        Ok(metadata) if metadata.is_file() => {
            return refuse(format!(
                "--file {shown}: {} bytes are too few; remove it, and the lab creates one",
                metadata.len()
            ));
        }
        Ok(_) => return refuse(format!("--file {shown}: not a regular file; use --device for a device")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => (wanted.disk_bytes, true),
        Err(error) => return refuse(format!("--file {shown}: {error}")),
    };
    Ok(Device {
        kind: DeviceKind::File,
        location: path.display().to_string(),
        name: None,
        size_bytes: size,
        writable,
        described: format!("file of {} MiB", size >> 20),
    })
}

fn null_blk_devices(host: &HostInfo) -> Result<Vec<Device>, DeviceSetupError> {
    if !host.path("sys/module/null_blk").exists() {
        return refuse(
            "--device null_blk: the module is not loaded (modprobe null_blk nr_devices=8 poll_queues=1)",
        );
    }
    let to_device = |block: crate::host::BlockDeviceInfo| Device {
        kind: DeviceKind::NullBlk,
        location: format!("/dev/{}", block.name),
        name: Some(block.name.clone()),
        size_bytes: block.size_bytes,
        writable: true,
        described: "null_blk: completes immediately, stores nothing".to_string(),
    };
    let blocks = host.blocks().into_iter();
    let devices: Vec<Device> =
        blocks.filter(|b| b.name.starts_with("nullb") && b.used_by.is_empty()).map(to_device).collect();
    if devices.is_empty() {
        return refuse("--device null_blk: no device of the module is free");
    }
    Ok(devices)
}

/// Locks the devices, and creates those that do not exist yet: loop devices with their files, and a file.
///
/// # Errors
/// A device that another run has locked, or an error of the file system, for example that the disk is full. The
/// journal contains what was created until then.
pub fn create(
    devices: &mut [Device],
    folder: &Path,
    journal: &mut Journal,
    locks: &mut DeviceLocks,
    host: &HostInfo,
) -> Result<(), DeviceSetupError> {
    let failed = |what: &Path, error: io::Error| DeviceSetupError(format!("{}: {error}", what.display()));
    let folder = &std::path::absolute(folder).map_err(|error| failed(folder, error))?;
    for (number, device) in devices.iter_mut().enumerate() {
        match device.kind {
            DeviceKind::File if !Path::new(&device.location).exists() => {
                lock(locks, device, host)?;
                let path = PathBuf::from(&device.location);
                journal.record_file(&path).map_err(|error| failed(&path, error))?;
                write_pattern(&path, device.size_bytes).map_err(|error| failed(&path, error))?;
            }
            DeviceKind::Loop if device.location.is_empty() => {
                fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
                let path = folder.join(format!("disk{number}"));
                journal.record_file(&path).map_err(|error| failed(&path, error))?;
                write_pattern(&path, device.size_bytes).map_err(|error| failed(&path, error))?;
                let node = attach(&path, journal)?;
                device.name = host.block_name(&node);
                device.location = node.display().to_string();
            }
            _ => {}
        }
        // Locks also the inode of a file that did not exist before.
        lock(locks, device, host)?;
    }
    Ok(())
}

fn lock(locks: &mut DeviceLocks, device: &Device, host: &HostInfo) -> Result<(), DeviceSetupError> {
    locks.lock(device, host).map_err(|error| DeviceSetupError(error.to_string()))
}

/// Writes a file without holes or repetition: reads of a hole do not reach the disk.
fn write_pattern(path: &Path, bytes: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut chunk = vec![0u8; 1 << 20];
    let mut random = WyRand::new(0);
    let mut left = bytes;
    while left > 0 {
        for word in chunk.chunks_exact_mut(8) {
            word.copy_from_slice(&random.next_bits().to_le_bytes());
        }
        let length = left.min(chunk.len() as u64) as usize;
        file.write_all(&chunk[..length])?;
        left -= length as u64;
    }
    file.sync_all()
}

/// Attaches a loop device to a file, with direct I/O if the file system supports it.
fn attach(path: &Path, journal: &mut Journal) -> Result<PathBuf, DeviceSetupError> {
    let message = |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).trim().to_string();
    let name = path.to_str().ok_or_else(|| DeviceSetupError("the path is not UTF-8".to_string()))?;
    for _ in 0..ATTACH_ATTEMPTS_MAX {
        let free = losetup().arg("--find").output();
        let free =
            free.map_err(|error| DeviceSetupError(format!("losetup: {error}; it is in util-linux")))?;
        let node = String::from_utf8_lossy(&free.stdout).trim().to_string();
        if node.is_empty() {
            return refuse(format!("no loop device is free: {}", message(&free)));
        }
        // Recorded before it is attached; restoring ignores a device that is attached to another file.
        journal
            .record_loop(Path::new(&node), path)
            .map_err(|error| DeviceSetupError(format!("journal: {error}")))?;
        let made = losetup().args(["--direct-io=on", &node, name]).output();
        let made = made.map_err(|error| DeviceSetupError(format!("losetup: {error}")))?;
        if made.status.success() {
            return Ok(PathBuf::from(node));
        }
        let plain = losetup().args([node.as_str(), name]).output();
        if plain.is_ok_and(|plain| plain.status.success()) {
            return Ok(PathBuf::from(node));
        }
        // Another program attached it first: try the next free one.
        if fs::metadata(&node).is_ok_and(|metadata| metadata.rdev() != 0) && message(&made).contains("busy") {
            continue;
        }
        return refuse(format!("losetup {node}: {}", message(&made)));
    }
    refuse("other programs attached every free loop device first")
}

#[cfg(test)]
mod tests;
