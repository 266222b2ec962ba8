//! What a target implements: its protocol, once per core, and a connection of it.

use std::fmt;
use std::io;
use std::sync::{Arc, LazyLock};

use block_io::{Status, Tag};
use dma::Pool;
use sockets::{ByteStream, StreamAddress, TransferResult};

use crate::connections::{ConnectionRequests, Connections};
use crate::device_map::DeviceMap;
use crate::devices::CoreDevices;
use crate::memory::{MemoryOwner, MemoryShare};
use crate::peers::PeerKey;
use crate::timers::NEVER_NS;
use crate::transfers::TransferReport;

/// A target's protocol on one core: state that all connections of the core share.
///
/// The group owns it and lends it to connections ([`IoContext::protocol`]). Only [`accept`](Self::accept) is
/// required; the other functions are called once a poll or less.
pub trait Protocol: Sized + 'static {
    /// Name of the poller in statistics and stall reports.
    const NAME: &'static str;
    /// Target of log lines: the flag that selects them.
    const LOG_TARGET: &'static str = Self::NAME;

    /// The configuration that is published to every core.
    type Config: TargetConfig;
    /// A connection.
    type Connection: ProtocolConnection<Self>;
    /// A violation of the protocol, or another reason of its own to close a connection; logged with the
    /// peer's address.
    type Error: fmt::Display;

    /// Whether the group with this index may serve connections of a listener. By default every group may; if
    /// none may, the one that has accepted the connection does.
    fn may_serve(&self, config: &Arc<Self::Config>, portid: u16, group: usize) -> bool {
        let _ = (config, portid, group);
        true
    }

    /// The state of a new connection. `None` closes it.
    fn accept(
        &mut self,
        accepted: Accepted,
        config: &Arc<Self::Config>,
        now_ns: u64,
    ) -> Option<Self::Connection>;

    /// Applies a configuration to the connections. Channels to new devices are open; those of removed devices
    /// are closed, and requests to them fail.
    fn apply(
        &mut self,
        config: &Arc<Self::Config>,
        connections: &mut Connections<Self::Connection>,
        now_ns: u64,
    ) {
        let _ = (config, connections, now_ns);
    }

    /// Called first in each poll, for events from outside the connections. Returns their number.
    #[inline]
    fn begin_poll(&mut self, connections: &mut Connections<Self::Connection>, now_ns: u64) -> usize {
        let _ = (connections, now_ns);
        0
    }

    /// When [`begin_poll`](Self::begin_poll) is due without another reason to poll; [`NEVER_NS`] for never.
    #[inline]
    fn deadline_ns(&self) -> u64 {
        NEVER_NS
    }

    /// Called in each poll when device requests have been completed.
    #[inline]
    fn after_completions(&mut self, connections: &mut Connections<Self::Connection>) {
        let _ = connections;
    }

    /// A connection of this target, on any core, has asked all others to be rechecked
    /// ([`Notice::recheck`]).
    fn recheck(&mut self, connections: &mut Connections<Self::Connection>, now_ns: u64) {
        let _ = (connections, now_ns);
    }
}

/// A connection of a [`Protocol`], sans-IO but for the byte stream that it is lent.
///
/// A protocol over a byte stream implements [`receive`](Self::receive) and [`flush`](Self::flush). One
/// without, as a connection that was attached by [`Connections::attach`], works in [`poll`](Self::poll) and
/// [`resume`](Self::resume), and its events arrive in [`Protocol::begin_poll`]. The other functions have
/// defaults for a protocol without device requests, timers or waiting; each is a few instructions at most and
/// is called after the connection had work.
pub trait ProtocolConnection<P: Protocol>: 'static {
    /// Reads what has arrived, until the stream is blocked or for as long as is fair to others. `scratch` is
    /// the core's, and its content is lost afterwards. By default, for a connection without a stream,
    /// nothing.
    ///
    /// # Errors
    /// The connection is closed for this reason; what [`flush`](Self::flush) can send at once is sent first.
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut IoContext<'_, P>,
    ) -> Result<MoreToRead, CloseReason<P::Error>> {
        let _ = (stream, scratch, context);
        Ok(MoreToRead::Unchanged)
    }

    /// Continues what [`wants_resume`](Self::wants_resume) or [`is_waiting`](Self::is_waiting) announced.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    fn resume(&mut self, context: &mut IoContext<'_, P>) -> Result<MoreToRead, CloseReason<P::Error>> {
        let _ = context;
        Ok(MoreToRead::No)
    }

    /// A device request has completed; `tag` is the one that it was submitted with. What it makes possible is
    /// submitted in [`resume`](Self::resume).
    fn complete(&mut self, tag: u64, completion: bdev::Completion) {
        let _ = tag;
        drop(completion);
    }

    /// Completes device requests, in this order, without taking them over. Returns whether it has completed
    /// all; if not, each is passed to [`complete`](Self::complete), which then ignores those that were. By
    /// default it completes none. The lower [`REQUEST_TAG_BITS`] bits of their tags are the protocol's.
    #[inline]
    fn complete_in_place(&mut self, completions: &[bdev::Completion]) -> bool {
        let _ = completions;
        false
    }

    /// Sends what is queued, as far as the stream takes it. A ready stream leads to
    /// [`receive`](Self::receive) and then to this. By default, for a connection without a stream, nothing.
    ///
    /// # Errors
    /// The connection is closed for this reason.
    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<P::Error>> {
        let _ = stream;
        Ok(())
    }

    /// A send that [`flush`](Self::flush) made by [`ByteStream::send_owned`] has ended. The connection is
    /// flushed in the same poll. By default nothing happens: for protocols that make no such sends.
    fn sent(&mut self, tag: u64) {
        let _ = tag;
    }

    /// Whether work arrives through memory that the peer shares, without an event. Asked after
    /// [`Protocol::accept`], [`receive`](Self::receive), [`resume`](Self::resume), [`poll`](Self::poll) and
    /// [`on_deadline`](Self::on_deadline).
    #[inline]
    fn polling(&self) -> Polling {
        Polling::Off
    }

    /// Looks for work in shared memory, once in each poll of the group while [`polling`](Self::polling) is
    /// not [`Polling::Off`]. Returns the number of commands found; [`flush`](Self::flush) follows unless it
    /// is 0. What changes [`deadline_ns`](Self::deadline_ns) or [`is_waiting`](Self::is_waiting) must lead to
    /// a [`resume`](Self::resume).
    #[inline]
    fn poll(&mut self, context: &mut IoContext<'_, P>) -> usize {
        let _ = context;
        0
    }

    /// Work can continue in the same poll, without an event.
    #[inline]
    fn wants_resume(&self) -> bool {
        false
    }

    /// Something waits for what no event reports, as a buffer that another core frees: retried each
    /// millisecond.
    #[inline]
    fn is_waiting(&self) -> bool {
        false
    }

    /// The connection accepts no more commands and closes when it [`is_drained`](Self::is_drained).
    #[inline]
    fn is_draining(&self) -> bool {
        false
    }

    /// The target stops, or this connection's listener, peer or configuration is removed.
    /// [`is_draining`](Self::is_draining) is true afterwards.
    fn begin_drain(&mut self);

    /// The commands in flight have completed and everything is sent.
    fn is_drained(&self) -> bool {
        true
    }

    /// When [`on_deadline`](Self::on_deadline) is due; [`NEVER_NS`] for never. Asked after
    /// [`Protocol::accept`], [`receive`](Self::receive), [`resume`](Self::resume) and `on_deadline`. A later
    /// deadline costs nothing.
    #[inline]
    fn deadline_ns(&self) -> u64 {
        NEVER_NS
    }

    /// The deadline has passed.
    ///
    /// # Errors
    /// The connection is closed for this reason.
    fn on_deadline(&mut self, protocol: &mut P, now_ns: u64) -> Result<(), CloseReason<P::Error>> {
        let _ = (protocol, now_ns);
        Ok(())
    }

    /// Reports what the connection waits for its peer with: data that the peer owes, answers that it has not
    /// read. Asked about once a second while connections of the core are active, and as long as one of them
    /// waits. A peer that takes longer than [`GroupLimits::transfer_timeout_ns`](crate::GroupLimits) without
    /// any progress, or is too slow while others lack memory, is disconnected
    /// ([`abandon_transfers`](Self::abandon_transfers)). By default nothing waits.
    fn transfers(&self, report: &mut TransferReport) {
        let _ = report;
    }

    /// Its share of the core's memory, if it counts what it holds ([`IoContext::memory_share`]).
    fn memory(&mut self) -> Option<&mut MemoryShare> {
        None
    }

    /// The peer was too slow, and is disconnected after this: queues what the protocol has to say. What can
    /// be sent at once is.
    fn abandon_transfers(&mut self) {}

    /// What the group has to know since the last call; asked once after each flush.
    #[inline]
    fn take_notice(&mut self) -> Notice {
        Notice::default()
    }

    /// What its commands have cost the core so far, wrapping: one for each, and one for each
    /// [`TURN_COMMAND_BYTES`] of data. `None` for a connection that cannot move to another core, at present
    /// or ever; by default none can.
    fn work(&self) -> Option<u64> {
        None
    }

    /// Prepares a move to another core: commands in flight complete, and others are not begun, until
    /// [`is_movable`](Self::is_movable) or [`cancel_move`](Self::cancel_move). Only called while
    /// [`work`](Self::work) is not `None`.
    fn begin_move(&mut self) {}

    /// The move does not take place; [`resume`](Self::resume) follows, and continues what was not begun.
    fn cancel_move(&mut self) {}

    /// Whether nothing of the connection is in use by this core: no device request, no buffer of its pool,
    /// and nothing that is still to be sent. Asked in each poll after [`begin_move`](Self::begin_move).
    fn is_movable(&self) -> bool {
        false
    }

    /// Takes the state of a connection that [is movable](Self::is_movable) apart. What is returned makes the
    /// connection anew on the other core, with that core's resources and its configuration, which is not
    /// older than this core's. `None` closes it.
    fn detach(self) -> Option<Reattach<P>>
    where
        Self: Sized,
    {
        None
    }

    /// What the peer has logged in to, if the target's connections are counted by it as well: an export, a
    /// controller, a target node or a subsystem, by an identifier of its own. Asked once, after the login, or
    /// after [`Protocol::accept`] where there is none.
    fn object(&self) -> Option<u64> {
        None
    }

    /// The tenant that its requests are for, by a name that is the same for all connections of one client, on
    /// whatever core: what the peer has logged in as. Asked once, after the login, or after
    /// [`Protocol::accept`] where there is none. By default the peer by its address or process.
    fn tenant(&self) -> Option<String> {
        None
    }

    /// Whether the peer has still to log in. Asked once, after [`Protocol::accept`]; [`Notice::logged_in`]
    /// ends it. The target keeps few such connections ([`GroupLimits`](crate::GroupLimits)).
    fn awaits_login(&self) -> bool {
        false
    }

    /// The stream is closed. The connection itself stays until its device requests have completed. Returns
    /// whether the other connections have to be rechecked, as [`Notice::recheck`].
    fn on_close(&mut self) -> bool {
        false
    }
}

/// Bits of a device request's tag that belong to the protocol. The others name the connection.
pub const REQUEST_TAG_BITS: u32 = 42;
pub(crate) const REQUEST_TAG_MASK: u64 = (1 << REQUEST_TAG_BITS) - 1;

/// How a connection's work arrives, apart from its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Only through the stream.
    Off,
    /// Through memory, with a message on the stream if the core may sleep.
    WhileAwake,
    /// Through memory alone. A core without other work polls at growing intervals, up to a millisecond.
    Timed {
        /// When work was last found.
        active_ns: u64,
    },
}

/// The configuration of a target, as cores see it.
pub trait TargetConfig: Default + Send + Sync + 'static {
    /// The block devices that connections submit to. By default there are none.
    fn devices(&self) -> &DeviceMap {
        static NONE: LazyLock<DeviceMap> = LazyLock::new(DeviceMap::new);
        &NONE
    }
}

impl TargetConfig for () {}

/// Makes a connection that has moved here from another core: see [`ProtocolConnection::detach`].
pub type Reattach<P> = Box<dyn FnOnce(&mut IoContext<'_, P>) -> <P as Protocol>::Connection + Send>;

/// A connection that was accepted.
#[derive(Clone, Debug)]
pub struct Accepted {
    /// The listener's identifier, from [`TargetCores::listen`](crate::TargetCores::listen).
    pub portid: u16,
    /// The local address.
    pub local: StreamAddress,
    /// The peer's address.
    pub peer: StreamAddress,
    /// The peer, as far as connections and memory are counted.
    pub peer_key: PeerKey,
    /// For the connection's device requests ([`block_io::Request::flow`]): no other connection of the process
    /// has it, and the block layer knows by it for whom they are ([`bdev::Tenants`]).
    pub flow: u16,
}

/// What a connection reports to its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notice {
    /// The peer has logged in.
    pub logged_in: bool,
    /// The other connections of this target, on every core, have to be rechecked.
    pub recheck: bool,
}

/// Whether a connection has to be read again without a new event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoreToRead {
    /// Nothing had arrived, the connection is as it was, and it has nothing to send: nothing is asked of it
    /// and nothing is flushed. Busy polling finds this most of the time.
    Unchanged,
    /// The stream is blocked, or the connection does not read at present.
    No,
    /// More may be available.
    Yes,
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason<E> {
    /// The peer closed it.
    Closed,
    /// A socket operation failed.
    Network(io::ErrorKind),
    /// The protocol ends it. The only reason that is a warning in the log; others are details.
    Protocol(E),
    /// A limit on connections is reached ([`GroupLimits`](crate::GroupLimits)), which is logged.
    Limit,
    /// It is drained, or its drain took too long.
    Drained,
    /// The peer did not send what it owes, or read what it asked for, in time. A warning, too.
    TransferTimeout,
}

impl<E> CloseReason<E> {
    /// The number of bytes transferred; 0 if the stream is blocked.
    ///
    /// # Errors
    /// The stream has ended or failed.
    #[inline]
    pub fn check(result: TransferResult) -> Result<usize, CloseReason<E>> {
        match result {
            TransferResult::Bytes(count) => Ok(count),
            TransferResult::Blocked => Ok(0),
            TransferResult::Closed => Err(CloseReason::Closed),
            TransferResult::Failed(kind) => Err(CloseReason::Network(kind)),
        }
    }
}

/// What a group lends to a connection.
pub struct IoContext<'a, P: Protocol> {
    /// The core's buffers.
    pub pool: &'a Pool,
    /// The protocol's state of this core.
    pub protocol: &'a mut P,
    /// The configuration.
    pub config: &'a Arc<P::Config>,
    /// The time of this poll.
    pub now_ns: u64,
    pub(crate) turn: Turn,
    pub(crate) devices: &'a mut CoreDevices,
    pub(crate) requests: &'a mut ConnectionRequests,
}

/// Commands that a connection begins in a turn in which others have some too, or had lately: enough to share
/// the turn's fixed costs, while a command waits for as many of each other connection, and not for their
/// whole queues.
pub const TURN_COMMANDS_MAX: u32 = 32;
/// A command with more data than this counts as several: their copies take the time of as many commands.
pub const TURN_COMMAND_BYTES: u64 = 32 << 10;

/// As how many commands one with so many bytes of data counts.
#[inline]
pub fn turn_cost(bytes: u64) -> u32 {
    1 + (bytes.saturating_sub(1) / TURN_COMMAND_BYTES).min(u64::from(u32::MAX - 1)) as u32
}

/// What a connection may begin in this turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// What is left; `u32::MAX` for no limit.
    commands: u32,
}

impl Turn {
    /// `is_shared`: other connections have something to begin too. `is_over`: this one is continued in the
    /// next turn.
    #[inline]
    pub(crate) fn new(is_shared: bool, is_over: bool) -> Turn {
        let commands = match (is_shared, is_over) {
            (false, _) => u32::MAX,
            (true, false) => TURN_COMMANDS_MAX,
            (true, true) => 0,
        };
        Turn { commands }
    }
}

impl<P: Protocol> IoContext<'_, P> {
    /// Commands that the connection may begin in this turn. There is no limit if it is the only one of the
    /// core with something to begin. One that has more returns [`MoreToRead::Yes`], or fetches it in the next
    /// [`ProtocolConnection::poll`].
    #[inline]
    pub fn turn_commands(&self) -> usize {
        self.turn.commands as usize
    }

    /// Whether there is a limit, so that commands count.
    #[inline]
    pub fn is_turn_shared(&self) -> bool {
        self.turn.commands < u32::MAX
    }

    /// Counts a command that was begun, with so many bytes of data.
    #[inline]
    pub fn count_command(&mut self, bytes: u64) {
        if self.is_turn_shared() {
            self.turn.commands = self.turn.commands.saturating_sub(turn_cost(bytes));
        }
    }

    /// A share of the core's memory for the connection, of at most `bytes_max`, or one command.
    pub fn memory_share(&self, bytes_max: usize) -> MemoryShare {
        match &self.requests.peer {
            Some(peer) => MemoryShare::new(peer.clone(), bytes_max),
            None => MemoryShare::unlimited(),
        }
    }

    /// As [`memory_share`](Self::memory_share), bounded together with the others of this name: by
    /// `owner_max`, or, apart from their first windows, as all windows of the core.
    pub fn memory_share_of(&self, owner: &[u8], owner_max: Option<usize>, bytes_max: usize) -> MemoryShare {
        let Some(peer) = &self.requests.peer else { return MemoryShare::unlimited() };
        let core = peer.core();
        let owner = MemoryOwner::Name(owner.into());
        let account = match owner_max {
            Some(owner_max) => core.strict_peer(owner, owner_max),
            None => core.peer(owner, core.limits().shared),
        };
        MemoryShare::new(account, bytes_max).with_source(peer.clone())
    }

    /// Adds a request to the batch of the device with this key. Only the lower [`REQUEST_TAG_BITS`] bits of
    /// its tag are the protocol's.
    ///
    /// # Errors
    /// The device was removed.
    // Inlined for the same reason as `CoreDevices::submit`: 30 instructions an I/O.
    #[inline(always)]
    pub fn submit(&mut self, key: u32, mut request: bdev::Request) -> Result<(), Status> {
        debug_assert!(request.tag.0 <= REQUEST_TAG_MASK, "tag {:#x} has too many bits", request.tag.0);
        request.tag = Tag(self.requests.tag_base | request.tag.0);
        self.devices.submit(key, request)?;
        self.requests.outstanding += 1;
        Ok(())
    }
}
