//! Block devices of this machine (`/dev/nbdN`): exports to which the kernel's own NBD client is connected.
//!
//! The exports of these disks listen at a UNIX socket of their own in a private directory. This module
//! connects to it, performs the handshake, and gives the sockets to the kernel, which then sends requests to
//! the reactors as any client.

mod client;
mod device;
mod netlink;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};

use bdev::{Closing, DeviceEvent, Registry};
use reactor::blocking;
use rustix::io::Errno;
use sockets::StreamAddress;

use self::device::{DeviceLock, KernelDevice};
use self::netlink::{KernelConnect, NbdNetlink};
use crate::{ExportConfig, ExportInfo, NbdTarget, NbdTargetError};

/// Most connections of one disk: a queue of the kernel each.
const CONNECTIONS_MAX: u32 = 16;

/// What the kernel's identifier of a server begins with; the name of the bdev follows.
const BACKEND: &str = "ringbolt:";

/// A bdev that is a block device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelDisk {
    /// Name of the bdev.
    pub bdev_name: String,
    /// The number N of `/dev/nbdN`.
    pub index: u32,
    /// Connections.
    pub connections: u32,
    /// Seconds that its requests wait for the next process when this one is killed; 0 for not at all.
    pub reconnect_timeout_s: u32,
    export: String,
}

/// What a disk is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskRequest<'a> {
    pub(crate) bdev_name: &'a str,
    /// The number N of `/dev/nbdN`; the kernel chooses without one.
    pub(crate) index: Option<u32>,
    pub(crate) connections: u32,
    pub(crate) reconnect_timeout_s: u32,
}

impl KernelDisk {
    /// Path of the block device.
    pub fn device(&self) -> String {
        format!("/dev/nbd{}", self.index)
    }
}

/// Why a disk could not be started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum KernelDiskError {
    /// The export could not be created or deleted.
    #[error(transparent)]
    Target(#[from] NbdTargetError),
    /// A parameter is invalid.
    #[error("{0}")]
    Invalid(String),
    /// There is no such disk.
    #[error("there is no disk {0}")]
    NotFound(String),
    /// The directory, the socket or the handshake failed.
    #[error("{doing}: {source}")]
    Io {
        /// What failed.
        doing: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The kernel refused.
    #[error("{}", explain(*.0, .1))]
    Kernel(Errno, String),
}

fn explain(errno: Errno, device: &str) -> String {
    match errno {
        Errno::NOENT => "the kernel has no NBD driver (modprobe nbd)".to_string(),
        Errno::PERM | Errno::ACCESS => format!("{device}: only root may connect it (CAP_SYS_ADMIN)"),
        Errno::BUSY => format!("{device}: it is connected already"),
        errno => format!("{device}: {errno}"),
    }
}

/// A disk, and the lock that tells other processes that it is served.
struct ServedDisk {
    disk: KernelDisk,
    _lock: Option<DeviceLock>,
}

/// The disks of a target.
pub(crate) struct KernelDisks {
    disks: Arc<Mutex<Vec<ServedDisk>>>,
    /// Has a thread end the disks whose exports are gone; `None` before the first disk.
    check: Arc<OnceLock<SyncSender<()>>>,
}

impl KernelDisks {
    /// Disks of devices of `registry`: they end when their device is removed.
    pub(crate) fn new(registry: &Registry) -> KernelDisks {
        let check: Arc<OnceLock<SyncSender<()>>> = Arc::default();
        let sender = Arc::downgrade(&check);
        // The target, which has subscribed before, has deleted the exports of the device.
        registry.subscribe(Box::new(move |event| {
            if matches!(event, DeviceEvent::Removed(_))
                && let Some(sender) = sender.upgrade()
                && let Some(sender) = sender.get()
            {
                // If it is full, a check follows that has not begun.
                _ = sender.try_send(());
            }
        }));
        KernelDisks { disks: Arc::default(), check }
    }

    /// Starts the thread that ends disks: a disconnect waits for requests, and the caller that removes a
    /// device must not.
    fn start_worker(&self, target: &NbdTarget) -> Result<(), KernelDiskError> {
        if self.check.get().is_some() {
            return Ok(());
        }
        let (sender, receiver) = sync_channel(1);
        let (disks, target) = (Arc::downgrade(&self.disks), target.clone());
        let check = move |()| {
            if let Some(disks) = disks.upgrade() {
                end_without_export(&mut sync::lock(&disks), &target);
            }
        };
        let spawned = blocking::spawn_worker("nbd", receiver, check);
        spawned.map_err(|source| KernelDiskError::Io { doing: "a thread cannot be created", source })?;
        // Only one call at a time starts a disk.
        _ = self.check.set(sender);
        Ok(())
    }

    /// Makes a bdev a block device. If a killed process left the device of that number, of a bdev of the same
    /// name, its users go on with this one.
    pub(crate) fn start(
        &self,
        target: &NbdTarget,
        request: &DiskRequest<'_>,
    ) -> Result<KernelDisk, KernelDiskError> {
        if !(1..=CONNECTIONS_MAX).contains(&request.connections) {
            let reason = format!("connections: expected 1 to {CONNECTIONS_MAX}");
            return Err(KernelDiskError::Invalid(reason));
        }
        let device = request.index.map_or("/dev/nbd*".to_string(), |index| format!("/dev/nbd{index}"));
        let mut netlink = NbdNetlink::open().map_err(|errno| KernelDiskError::Kernel(errno, device))?;
        let mut disks = sync::lock(&self.disks);
        self.start_worker(target)?;
        let directory = private_directory()?;
        let export = free_export_name(&disks, request.bdev_name);
        let path = directory.join("socket");
        let info = target.create(ExportConfig {
            bdev_name: request.bdev_name.to_string(),
            name: export.clone(),
            description: String::new(),
            read_only: false,
            require_tls: false,
            address: StreamAddress::Unix(path.clone()),
        });
        let connected = info
            .map_err(KernelDiskError::from)
            .and_then(|info| connect(&mut netlink, request, &info, &path, &export));
        // The kernel has the connections, and no other client is to find the socket.
        _ = std::fs::remove_dir_all(&directory);
        match connected {
            Ok(served) => {
                let disk = served.disk.clone();
                disks.push(served);
                Ok(disk)
            }
            Err(error) => {
                _ = target.delete(&export);
                Err(error)
            }
        }
    }

    /// Ends a disk. Its users get I/O errors. What it returns waits until the bdev is free.
    pub(crate) fn stop(&self, target: &NbdTarget, device: &str) -> Result<Closing, KernelDiskError> {
        let mut disks = sync::lock(&self.disks);
        let at = disks.iter().position(|served| served.disk.device() == device);
        let at = at.ok_or_else(|| KernelDiskError::NotFound(device.to_string()))?;
        let kernel = |errno| KernelDiskError::Kernel(errno, device.to_string());
        NbdNetlink::open()
            .and_then(|mut netlink| netlink.disconnect(disks[at].disk.index))
            .map_err(kernel)?;
        let served = disks.remove(at);
        match target.delete(&served.disk.export) {
            Ok(closing) => Ok(closing),
            // It went with its bdev.
            Err(NbdTargetError::NotFound(_)) => Ok(Closing::default()),
            Err(error) => Err(error.into()),
        }
    }

    /// Disconnects all, while the reactors still serve them.
    pub(crate) fn stop_all(&self) {
        for ServedDisk { disk, .. } in sync::lock(&self.disks).drain(..) {
            let stopped = NbdNetlink::open().and_then(|mut netlink| netlink.disconnect(disk.index));
            if let Err(errno) = stopped {
                log::warn!(target: "nbd", "{}", explain(errno, &disk.device()));
            }
        }
    }

    pub(crate) fn list(&self) -> Vec<KernelDisk> {
        sync::lock(&self.disks).iter().map(|served| served.disk.clone()).collect()
    }

    /// Whether an export belongs to a disk.
    pub(crate) fn owns(&self, export: &str) -> bool {
        sync::lock(&self.disks).iter().any(|served| served.disk.export == export)
    }
}

/// Connects to an export, and gives the connections to the kernel: for a new device, or for one that has lost
/// its own.
fn connect(
    netlink: &mut NbdNetlink,
    request: &DiskRequest<'_>,
    info: &ExportInfo,
    path: &Path,
    export: &str,
) -> Result<ServedDisk, KernelDiskError> {
    let block_size = u64::from(info.block_size);
    if !block_size.is_power_of_two() || block_size > rustix::param::page_size() as u64 {
        let reason = format!("bdev_name: the kernel has no block devices of {block_size}-byte blocks");
        return Err(KernelDiskError::Invalid(reason));
    }
    let streams: Result<Vec<_>, _> =
        (0..request.connections).map(|_| client::connect(path, export)).collect();
    let streams = streams
        .map_err(|source| KernelDiskError::Io { doing: "the connection to the target failed", source })?;
    let sockets: Vec<_> = streams.iter().map(|(stream, _)| stream.as_fd()).collect();
    let connect = KernelConnect {
        index: request.index,
        size: info.size,
        block_size: info.block_size,
        flags: streams[0].1.flags.bits(),
        sockets: &sockets,
        backend: &format!("{BACKEND}{}", info.config.bdev_name),
        reconnect_timeout_s: request.reconnect_timeout_s,
    };
    let name = |index: Option<u32>| index.map_or("/dev/nbd*".to_string(), |index| format!("/dev/nbd{index}"));
    let (index, lock) = match (netlink.connect(&connect), request.index) {
        (Ok(index), _) => (index, KernelDevice::new(index).lock()),
        (Err(Errno::BUSY), Some(index)) => {
            let lock = reconnect(netlink, index, &connect)?;
            log::info!(target: "nbd", "/dev/nbd{index}: it was left by a process that was killed");
            (index, Some(lock))
        }
        (Err(errno), index) => return Err(KernelDiskError::Kernel(errno, name(index))),
    };
    let disk = KernelDisk {
        bdev_name: info.config.bdev_name.clone(),
        index,
        connections: request.connections,
        reconnect_timeout_s: request.reconnect_timeout_s,
        export: export.to_string(),
    };
    Ok(ServedDisk { disk, _lock: lock })
}

/// Reconnects a device that a killed process left.
fn reconnect(
    netlink: &mut NbdNetlink,
    index: u32,
    connect: &KernelConnect<'_>,
) -> Result<DeviceLock, KernelDiskError> {
    let device = KernelDevice::new(index);
    let kernel = |errno| KernelDiskError::Kernel(errno, format!("/dev/nbd{index}"));
    if device.backend().as_deref() != Some(connect.backend) {
        return Err(kernel(Errno::BUSY));
    }
    // The server of a disk holds the lock.
    let lock = device.lock().ok_or(kernel(Errno::BUSY))?;
    if device.shape() != Some((connect.size, connect.block_size)) {
        let reason = format!("bdev_name: it has not the size or the blocks of /dev/nbd{index}");
        return Err(KernelDiskError::Invalid(reason));
    }
    netlink.reconnect(index, connect).map_err(kernel)?;
    Ok(lock)
}

/// Ends the disks whose exports were deleted, because their devices were removed. Their users get I/O errors.
fn end_without_export(disks: &mut Vec<ServedDisk>, target: &NbdTarget) {
    let exports = target.configured();
    let (kept, ended) = std::mem::take(disks)
        .into_iter()
        .partition(|served: &ServedDisk| exports.iter().any(|one| one.config.name == served.disk.export));
    *disks = kept;
    for ServedDisk { disk, .. } in ended {
        log::info!(target: "nbd", "{}: disconnected, {} was removed", disk.device(), disk.bdev_name);
        let stopped = NbdNetlink::open().and_then(|mut netlink| netlink.disconnect(disk.index));
        if let Err(errno) = stopped {
            log::warn!(target: "nbd", "{}", explain(errno, &disk.device()));
        }
    }
}

/// A new directory that only this user can enter.
fn private_directory() -> Result<PathBuf, KernelDiskError> {
    use std::os::unix::fs::DirBuilderExt;
    let failed = |source| KernelDiskError::Io { doing: "a directory for a socket cannot be created", source };
    // Every listener has a path of its own: that of a disk outlives its directory.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..100 {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ringbolt-nbd-{}-{number}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Err(failed(std::io::ErrorKind::AlreadyExists.into()))
}

fn free_export_name(disks: &[ServedDisk], bdev_name: &str) -> String {
    let is_used = |name: &String| disks.iter().any(|served| served.disk.export == *name);
    let names = (0..=disks.len()).map(|number| format!("kernel-{number}-{bdev_name}"));
    names.into_iter().find(|name| !is_used(name)).unwrap_or_default()
}

/// The number N of `/dev/nbdN`.
pub(crate) fn device_index(device: &str) -> Result<u32, KernelDiskError> {
    let number = device.strip_prefix("/dev/nbd").and_then(|number| number.parse().ok());
    number.ok_or_else(|| KernelDiskError::Invalid(format!("nbd_device: {device} is not /dev/nbdN")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_paths_are_parsed() {
        assert_eq!(device_index("/dev/nbd12").unwrap(), 12);
        for wrong in ["/dev/nbd", "/dev/sda", "nbd1", "/dev/nbd1p1", "/dev/nbd-1"] {
            assert!(device_index(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_handshake_reaches_an_export() {
        let reactors =
            reactor::Reactors::start(&reactor::ReactorConfig { pin: false, ..Default::default() }).unwrap();
        let registry = bdev::Registry::new();
        bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("M", 2048, 512)).unwrap();
        let target = NbdTarget::new(registry, reactors.handles());
        let directory = private_directory().unwrap();
        let path = directory.join("socket");
        let config = ExportConfig {
            bdev_name: "M".into(),
            name: "disk".into(),
            description: "a disk".into(),
            read_only: false,
            require_tls: false,
            address: StreamAddress::Unix(path.clone()),
        };
        target.create(config).unwrap();
        let (_stream, export) = client::connect(&path, "disk").unwrap();
        assert_eq!(export.size, 1 << 20);
        assert!(export.flags.contains(wire_nbd::TransmissionFlags::CAN_MULTI_CONN));
        let error = client::connect(&path, "other").unwrap_err();
        assert!(error.to_string().contains("ErrUnknown"), "{error}");
        std::fs::remove_dir_all(directory).unwrap();
        target.shutdown();
        reactors.stop();
    }
}
