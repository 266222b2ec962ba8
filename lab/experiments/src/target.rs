//! What is driven: block devices, files, loop devices that the lab makes, or block devices of the
//! generator's own, by URI.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use random::WyRand;

use crate::host::Host;
use crate::journal::Journal;
use crate::locks::DeviceLocks;
use crate::loops::losetup;
use crate::record::Target;

/// Most devices of a run.
pub const DEVICES_MAX: usize = 64;
/// Most loop devices that the lab makes; the largest study has eight devices.
pub const LOOPS_MAX: usize = 8;
/// Smallest device that is worth driving.
const SIZE_MIN: u64 = 1 << 20;
/// How often another program may take the loop device that was free.
const ATTEMPTS: usize = 16;

/// Why a device cannot be used. One line each, which says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TargetError(pub String);

fn refuse<T>(line: impl Into<String>) -> Result<T, TargetError> {
    Err(TargetError(line.into()))
}

/// What kind of thing is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A block device that the user names.
    Block,
    /// A file that the user names.
    File,
    /// A loop device over a file, both made and removed by the lab.
    Loop,
    /// The kernel's null_blk.
    NullBlk,
    /// A block device of the generator's own, as `model:…` or `nvme+tcp://…`.
    Uri,
}

impl Kind {
    /// Its name in `plan.toml`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Block => "block",
            Kind::File => "file",
            Kind::Loop => "loop",
            Kind::NullBlk => "null_blk",
            Kind::Uri => "uri",
        }
    }

    /// The kind of a name.
    pub fn from_name(name: &str) -> Option<Kind> {
        [Kind::Block, Kind::File, Kind::Loop, Kind::NullBlk, Kind::Uri]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

/// One device of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// What it is.
    pub kind: Kind,
    /// Its node, path or URI. Empty for a loop device that is not made yet.
    pub place: String,
    /// Its name under `/sys/block`, where it has one.
    pub name: Option<String>,
    /// Bytes that are used.
    pub size_bytes: u64,
    /// Whether it may be written to.
    pub writable: bool,
    /// What it is, in words.
    pub described: String,
}

/// What the user asks for.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Nodes, or URIs, or `null_blk`.
    pub devices: Vec<String>,
    /// A file.
    pub file: Option<PathBuf>,
    /// Devices and files whose data may be lost.
    pub destroy: Vec<String>,
    /// Bytes of each disk that the lab makes.
    pub disk_bytes: u64,
}

impl Device {
    /// As it stands in `plan.toml`.
    pub fn as_target(&self) -> Target {
        Target {
            kind: self.kind.name().to_string(),
            path: self.place.clone(),
            size_bytes: self.size_bytes,
            described: self.described.clone(),
        }
    }

    /// Whether it is there.
    pub fn is_there(&self, host: &Host) -> bool {
        match (self.kind, &self.name) {
            (Kind::Uri, _) => true,
            (Kind::File, _) => Path::new(&self.place).exists(),
            (_, Some(name)) => {
                host.path(&format!("sys/block/{name}")).exists() && Path::new(&self.place).exists()
            }
            (_, None) => true,
        }
    }

    /// What the generator's own block layer is asked to open.
    pub fn uri(&self) -> String {
        if self.kind == Kind::Uri { self.place.clone() } else { format!("uring:{}", self.place) }
    }
}

/// The devices that were asked for. Nothing is made or changed yet; `count` loop devices stand for
/// themselves where nothing is named.
///
/// # Errors
/// A device that is not there, is in use, or must not be written to.
pub fn find(wanted: &Wanted, host: &Host, count: usize, root: bool) -> Result<Vec<Device>, TargetError> {
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
                "only root makes loop devices: run as root, or name a file (--file PATH) or a device of our own \
                 (--device null:1g)",
            );
        }
        let described = format!("loop device over a file of {} MiB", wanted.disk_bytes >> 20);
        let device = Device {
            kind: Kind::Loop,
            place: String::new(),
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
            devices.extend(null_blks(host)?);
        } else if is_uri(name) {
            devices.push(Device {
                kind: Kind::Uri,
                place: name.clone(),
                name: None,
                size_bytes: 0,
                writable: true,
                described: format!("{name}, of the generator's own block layer"),
            });
        } else {
            devices.push(block(name, wanted, host)?);
        }
    }
    let mut places: Vec<&str> = devices.iter().map(|device| device.place.as_str()).collect();
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

fn block(node: &str, wanted: &Wanted, host: &Host) -> Result<Device, TargetError> {
    let path = Path::new(node);
    let kind = match fs::metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) => return refuse(format!("--device {node}: {error}")),
    };
    if !kind.is_block_device() {
        return refuse(format!("--device {node}: it is no block device; a file goes to --file"));
    }
    let Some(name) = host.block_name(path) else {
        return refuse(format!(
            "--device {node}: partitions are not driven, only whole devices: a scheduler is of a device"
        ));
    };
    let facts = host.block(&name);
    if !facts.used_by.is_empty() {
        return refuse(format!(
            "--device {node}: in use ({}); nothing is run on it",
            facts.used_by.join(", ")
        ));
    }
    if facts.size_bytes < SIZE_MIN {
        return refuse(format!("--device {node}: {} bytes are too few", facts.size_bytes));
    }
    let writable = wanted.destroy.iter().any(|named| named == node);
    // O_EXCL on a block device fails where the kernel itself uses it.
    let exclusive = rustix::fs::OFlags::EXCL.bits() as i32;
    let opened = {
        use std::os::unix::fs::OpenOptionsExt;
        OpenOptions::new().read(true).write(writable).custom_flags(exclusive).open(path)
    };
    if let Err(error) = opened {
        return refuse(format!("--device {node}: {error}"));
    }
    // What has no model, as a loop device, has its name.
    let model = if facts.model.trim().is_empty() { &name } else { &facts.model };
    let described = format!("{model} {} {}", facts.firmware.trim(), amount(facts.size_bytes));
    Ok(Device {
        kind: Kind::Block,
        place: node.to_string(),
        name: Some(name.clone()),
        size_bytes: facts.size_bytes,
        writable,
        described: described.split_whitespace().collect::<Vec<_>>().join(" "),
    })
}

fn amount(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

fn file(path: &Path, wanted: &Wanted) -> Result<Device, TargetError> {
    let shown = path.display();
    let named = wanted.destroy.iter().any(|named| Path::new(named) == path);
    let (size, writable) = match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.len() >= SIZE_MIN => (metadata.len(), named),
        Ok(metadata) if metadata.is_file() => {
            return refuse(format!(
                "--file {shown}: {} bytes are too few; remove it, and the lab makes one",
                metadata.len()
            ));
        }
        Ok(_) => return refuse(format!("--file {shown}: it is no ordinary file; a device goes to --device")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => (wanted.disk_bytes, true),
        Err(error) => return refuse(format!("--file {shown}: {error}")),
    };
    Ok(Device {
        kind: Kind::File,
        place: path.display().to_string(),
        name: None,
        size_bytes: size,
        writable,
        described: format!("file of {} MiB", size >> 20),
    })
}

fn null_blks(host: &Host) -> Result<Vec<Device>, TargetError> {
    if !host.path("sys/module/null_blk").exists() {
        return refuse(
            "--device null_blk: the module is not loaded (modprobe null_blk nr_devices=8 poll_queues=1)",
        );
    }
    let of = |block: crate::host::Block| Device {
        kind: Kind::NullBlk,
        place: format!("/dev/{}", block.name),
        name: Some(block.name.clone()),
        size_bytes: block.size_bytes,
        writable: true,
        described: "null_blk: completes at once, keeps nothing".to_string(),
    };
    let blocks = host.blocks().into_iter();
    let devices: Vec<Device> =
        blocks.filter(|b| b.name.starts_with("nullb") && b.used_by.is_empty()).map(of).collect();
    if devices.is_empty() {
        return refuse("--device null_blk: the module has no device that is free");
    }
    Ok(devices)
}

/// Locks the devices, and makes what has to be made: loop devices with their files, and a file that is not there
/// yet.
///
/// # Errors
/// A device that another run measures, or what the system says, as that the disk is full. What was made by then is
/// in the journal.
pub fn make(
    devices: &mut [Device],
    folder: &Path,
    journal: &mut Journal,
    locks: &mut DeviceLocks,
    host: &Host,
) -> Result<(), TargetError> {
    let failed = |what: &Path, error: io::Error| TargetError(format!("{}: {error}", what.display()));
    let folder = &std::path::absolute(folder).map_err(|error| failed(folder, error))?;
    for (number, device) in devices.iter_mut().enumerate() {
        match device.kind {
            Kind::File if !Path::new(&device.place).exists() => {
                lock(locks, device, host)?;
                let path = PathBuf::from(&device.place);
                journal.makes_file(&path).map_err(|error| failed(&path, error))?;
                fill(&path, device.size_bytes).map_err(|error| failed(&path, error))?;
            }
            Kind::Loop if device.place.is_empty() => {
                fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
                let path = folder.join(format!("disk{number}"));
                journal.makes_file(&path).map_err(|error| failed(&path, error))?;
                fill(&path, device.size_bytes).map_err(|error| failed(&path, error))?;
                let node = attach(&path, journal)?;
                device.name = host.block_name(&node);
                device.place = node.display().to_string();
            }
            _ => {}
        }
        // Also what was not there before.
        lock(locks, device, host)?;
    }
    Ok(())
}

fn lock(locks: &mut DeviceLocks, device: &Device, host: &Host) -> Result<(), TargetError> {
    locks.lock(device, host).map_err(|error| TargetError(error.to_string()))
}

/// A file of blocks that are not zero, and not alike: a hole would be read without a disk.
fn fill(path: &Path, bytes: u64) -> io::Result<()> {
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

/// A loop device over a file, past the page cache where the file system lets it.
fn attach(path: &Path, journal: &mut Journal) -> Result<PathBuf, TargetError> {
    let said = |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).trim().to_string();
    let name = path.to_str().ok_or_else(|| TargetError("the path is no text".to_string()))?;
    for _ in 0..ATTEMPTS {
        let free = losetup().arg("--find").output();
        let free = free.map_err(|error| TargetError(format!("losetup: {error}; it is in util-linux")))?;
        let node = String::from_utf8_lossy(&free.stdout).trim().to_string();
        if node.is_empty() {
            return refuse(format!("no loop device can be had: {}", said(&free)));
        }
        // First noted, then made: a kill in between detaches nothing.
        journal
            .made_loop(Path::new(&node), path)
            .map_err(|error| TargetError(format!("journal: {error}")))?;
        let made = losetup().args(["--direct-io=on", &node, name]).output();
        let made = made.map_err(|error| TargetError(format!("losetup: {error}")))?;
        if made.status.success() {
            return Ok(PathBuf::from(node));
        }
        let plain = losetup().args([node.as_str(), name]).output();
        if plain.is_ok_and(|plain| plain.status.success()) {
            return Ok(PathBuf::from(node));
        }
        // Somebody took it.
        if fs::metadata(&node).is_ok_and(|metadata| metadata.rdev() != 0) && said(&made).contains("busy") {
            continue;
        }
        return refuse(format!("losetup {node}: {}", said(&made)));
    }
    refuse("every free loop device was taken by somebody else")
}

#[cfg(test)]
mod tests;
