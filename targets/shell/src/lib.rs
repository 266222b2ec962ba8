//! What every target needs once: connections on all cores, block devices, configuration, and their end.
//!
//! A target implements [`Protocol`] (one value per core) and [`ProtocolConnection`] (one per connection), and
//! the shell does the rest: it accepts connections and spreads them over the cores, knows which of them have
//! work, lends them buffers and block devices, runs their timers, publishes the configuration, and drains and
//! closes them. A protocol touches no socket, clock or thread; it reads and writes the
//! [`ByteStream`](sockets::ByteStream) that it is lent.
//!
//! Three layers, of which a target may use only the lower ones:
//!
//! 1. [`PollGroup`] and [`GroupPoller`]: one core's share of a target, run by the reactor. [`CoreDevices`]:
//!    the core's channels to block devices, with one batch of requests each. [`CoreMailboxes`] starts the
//!    groups on all reactors and carries messages to them; a [`Request`] is a question to a core from another
//!    thread, which the core does not act on after the requester has stopped waiting.
//! 2. [`Publisher`]: the configuration as an immutable snapshot. A change is published to all cores and
//!    acknowledged by each; if one does not apply it in time, the change is rolled back everywhere, or the
//!    caller reports it as pending. A core that was blocked applies the latest snapshot only, so that it
//!    never sees one that was rolled back.
//! 3. [`TargetCores`], the control plane's handle, and [`ConnectionGroup`], the connections of a core.
//!    Generic over the protocol and the network: the calls between them are static, and no I/O costs a lock,
//!    an allocation or an indirect call here. Tests run a group on a simulated network.
//!
//! A connection stays on its core, or moves to another between two commands, if its protocol can
//! ([`ProtocolConnection::work`]): it completes what is in flight, and its stream and state go to the other
//! core by mailbox. `framework_set_scheduler` has the control plane decide who moves.
//!
//! Beside them is [`TargetControl`]: the state of a target under its lock, the block devices that it follows,
//! and its end. [`collect_connections`] reports its connections as metrics.
//!
//! One poll of a group: messages and configuration; [`Protocol::begin_poll`]; [`ProtocolConnection::receive`]
//! on each ready connection, which fills the batches of block devices; [`ProtocolConnection::poll`] on those
//! whose peers share memory with the target; one submission and one poll per device with work, and
//! [`ProtocolConnection::complete`]; one [`ProtocolConnection::flush`] for each connection with something to
//! send; timers; the close of drained connections. Only connections with work are visited.
//!
//! [`GroupLimits`] bounds the connections: those whose peer has logged in, by peer, user and
//! [object](ProtocolConnection::object) ([`ConnectionLimits`]), and, apart from them, those whose peer has
//! not. [`Protocol::accept`] may refuse one by its address. A protocol that keeps buffers until its peer has
//! sent data or read answers takes them through a [`MemoryShare`] and reports what it waits for
//! ([`ProtocolConnection::transfers`]), so that no peer holds the memory that others need. `targets/example`
//! is a complete target in one file.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod admissions;
mod connections;
mod control;
mod cores;
mod cpu_mask;
mod device_keys;
mod device_map;
mod devices;
mod group;
mod layered;
mod lazy_cores;
mod logins;
mod mailboxes;
mod memory;
mod metrics;
mod move_history;
mod moves;
mod peers;
mod poller;
mod protocol;
mod publisher;
mod receive_buffer;
mod request;
mod send_queue;
mod timers;
mod transfers;

pub use admissions::{ConnectionLimits, PeerConnections};
pub use connections::{ConnectionEntry, Connections};
pub use control::{ControlledTarget, TargetControl, TargetStopping, WeakTargetControl};
pub use cores::TargetCores;
pub use cpu_mask::{CpuMaskError, canonical_mask, mask_of_reactors, reactors_of_mask};
pub use device_map::DeviceMap;
pub use devices::CoreDevices;
pub use group::{ConnectionGroup, ConnectionTotals};
pub use layered::Layered;
pub use lazy_cores::LazyCores;
pub use logins::GroupLimits;
pub use mailboxes::{CoreMailboxes, GroupMail, GroupWaker, Inbox, ShellError};
pub use memory::{CoreMemory, MemoryLimits, MemoryOwner, MemoryShare, NoMemory, PeerMemory};
pub use metrics::{collect_connections, connection_metrics};
pub use peers::PeerKey;
pub use poller::{GroupPoller, PollGroup};
pub use protocol::{
    Accepted, CloseReason, IoContext, MoreToRead, Notice, Polling, Protocol, ProtocolConnection,
    REQUEST_TAG_BITS, Reattach, TURN_COMMAND_BYTES, TURN_COMMANDS_MAX, TargetConfig, turn_cost,
};
pub use publisher::{NotApplied, Publisher, Subscription};
pub use receive_buffer::ReceiveBuffer;
pub use request::{NoAnswer, Request, Responder};
pub use send_queue::{OutgoingPdu, PduData, SendQueue};
pub use timers::NEVER_NS;
pub use transfers::TransferReport;

/// Time that the control plane waits for a core to apply a change or to answer: thousands of polls.
pub const CORE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(2);

/// Time that the end of a program waits for the connections of a target: each is closed after
/// [`GroupLimits::drain_timeout_ns`], 3 s by default, and then waits for its requests in flight.
pub const DRAIN_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
