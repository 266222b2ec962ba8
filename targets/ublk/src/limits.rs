//! Maxima, each with its reason.

use std::time::Duration;

/// Disks of the target; the driver's own limit is 64 unless its parameter `ublks_max` says otherwise.
pub(crate) const DISKS_MAX: usize = 256;
/// Queues of a disk: those of SPDK. More are reduced to this number, as SPDK does.
pub(crate) const QUEUES_MAX: u32 = 32;
/// Requests in flight of a queue: those of SPDK, reduced likewise.
pub(crate) const QUEUE_DEPTH_MAX: u32 = 1024;
/// Tags of all queues of a core. Each occupies one of the 4,096 operations of the core's event loop all the time.
pub(crate) const CORE_TAGS_MAX: u32 = 2048;
/// Queues of a core: as many as have these tags with the smallest useful depth.
pub(crate) const CORE_QUEUES_MAX: u32 = 512;
/// Most data of a request (`max_io_buf_bytes`): the driver's default. It is one buffer.
pub(crate) const IO_BYTES_MAX: u32 = 512 << 10;
/// Bytes of buffers that a queue has at a time, so that one disk does not take all memory. Further requests wait.
pub(crate) const QUEUE_BYTES_MAX: usize = 8 << 20;
/// Sectors of a discard or a write of zeroes: 1 GiB.
pub(crate) const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// Interval for retrying what waits without an event: for buffers that another core frees, for operations of the loop.
pub(crate) const RETRY_NS: u64 = 1_000_000;
/// Changes of devices that the worker has not handled yet; more than one for each disk are equal.
pub(crate) const EVENTS_MAX: usize = 1024;

/// Time of a command that only changes the driver's state.
pub(crate) const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the start of a disk, in which the kernel reads its partition table.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the requests of a disk that is stopped.
pub(crate) const STOP_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the kernel to end a process that was killed: io_uring's own end is asynchronous.
pub(crate) const RECOVERY_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval at which the driver is asked whether a device can be recovered, or its node has appeared: it sends no notification.
pub(crate) const ASK_INTERVAL: Duration = Duration::from_millis(20);
/// Time for udev to make the node of a character device.
pub(crate) const NODE_TIMEOUT: Duration = Duration::from_secs(5);

const _: () =
    assert!(IO_BYTES_MAX as usize <= dma::BUFFER_BYTES_MAX && IO_BYTES_MAX <= wire_ublk::IO_BYTES_MAX);
const _: () = assert!(QUEUE_DEPTH_MAX <= wire_ublk::QUEUE_DEPTH_MAX as u32);
