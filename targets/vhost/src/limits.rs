//! Maxima, each with its reason.

/// Controllers of the target.
pub(crate) const CONTROLLERS_MAX: usize = 1024;
/// Bytes of a controller's name: with the directory it has to fit the address of a socket.
pub(crate) const NAME_BYTES_MAX: usize = 255;
/// Connections of the target. A controller usually has one, and all controllers one user, who may have seven
/// eighths; each can have [`MEMORY_REGIONS_MAX`] regions, and the process 65,530 mappings
/// (`vm.max_map_count`).
///
/// Its workers on other cores are not counted: each core has at most one for each connection, so at most this many, and
/// they share the connection's mappings.
pub(crate) const CONNECTIONS_MAX: u32 = 512;
/// Connections of the target that have not begun a session: more than virtual machines that start at once.
pub(crate) const LOGINS_MAX: u32 = 64;
/// Virtqueues of a connection: messages name them by eight bits.
pub(crate) const QUEUES_MAX: usize = 256;
/// Memory regions of a connection; QEMU needs one for each memory device and a few more.
pub(crate) const MEMORY_REGIONS_MAX: usize = 64;
/// Requests of a connection in flight; others stay in their virtqueues.
pub(crate) const REQUESTS_MAX: u32 = 8192;
/// Requests fetched from one virtqueue in one poll, so that others have their turn.
pub(crate) const FETCHED_MAX: usize = 64;
/// Bytes of the requests that are fetched from a connection in one poll, the last request not counted: a device in
/// memory copies them within a millisecond.
pub(crate) const FETCHED_BYTES_MAX: u64 = 4 << 20;
/// Eventfds of drivers that a core watches: half of what its event loop can watch. Further virtqueues are polled.
pub(crate) const WATCHES_MAX: u32 = 2048;
/// Data segments of a request (`seg_max`): those of SPDK, and of a virtqueue of 128 without indirect descriptors.
pub(crate) const SEGMENTS_MAX: u32 = 126;
/// Bytes of a segment (`size_max`).
pub(crate) const SEGMENT_BYTES_MAX: u32 = 256 << 10;
/// Bytes of a request: what `seg_max` and `size_max` allow a driver. A longer copy would delay other connections.
pub(crate) const REQUEST_BYTES_MAX: u64 = SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64;
/// Descriptors of a chain: twice what `seg_max` allows, for drivers that divide the header.
pub(crate) const CHAIN_MAX: usize = 256;
/// Slices of a request's data: a segment may cross the border of memory regions.
pub(crate) const SLICES_MAX: usize = 512;
/// Sectors of a discard or a write of zeroes: 1 GiB.
pub(crate) const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// Bytes of a message's payload: a memory table has 264, the configuration space 268.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 4096;
/// Messages processed in one poll, so that I/O is not starved: a memory table moves all virtqueues.
pub(crate) const MESSAGES_PER_POLL_MAX: usize = 16;
/// Bytes of replies that are not sent.
pub(crate) const UNSENT_BYTES_MAX: usize = 64 << 10;
/// Descriptors in these replies.
pub(crate) const UNSENT_DESCRIPTORS_MAX: usize = 4;
/// After this time without a request, virtqueues are not polled any more and the driver's notifications are enabled:
/// ten round trips of a driver with one request in flight.
pub(crate) const IDLE_NS: u64 = 50_000;
/// Targets of a SCSI controller: those of SPDK.
pub(crate) const SCSI_TARGETS: usize = 8;
/// Commands of a logical unit that a driver has in flight (`cmd_per_lun`): the size of QEMU's virtqueues.
pub(crate) const SCSI_COMMANDS_PER_LUN: u32 = 128;
/// Commands of a connection of a SCSI controller in flight on a core; others stay in their virtqueues.
pub(crate) const SCSI_COMMANDS_MAX: u32 = SCSI_TARGETS as u32 * SCSI_COMMANDS_PER_LUN;
/// Task management functions of a connection in flight: those that fill a control queue of 128 descriptors.
pub(crate) const FUNCTIONS_MAX: usize = 64;
/// Bytes of buffers that the commands of a connection have on a core; READ and WRITE need none. One larger command is admitted
/// alone.
pub(crate) const BUFFERED_BYTES_MAX: usize = 8 << 20;
/// Events that wait for the driver's buffers: each target goes and comes back, and is resized. Then some are lost, which
/// the driver learns.
pub(crate) const EVENTS_MAX: usize = 32;
