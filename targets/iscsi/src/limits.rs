//! Maxima of the target, each with its reason.

/// Connections whose initiators have logged in, unless the options say otherwise.
pub(crate) const CONNECTIONS_DEFAULT: u32 = 1024;
/// The same, at most: the range of a core's slots.
pub(crate) const CONNECTIONS_MAX: u32 = 16_384;
/// Target nodes, portal groups and initiator groups, each.
pub(crate) const OBJECTS_MAX: usize = 1024;
/// Logical units of a target node: as many as peripheral device addressing reaches, which every initiator
/// knows.
pub(crate) const LUNS_MAX: usize = 256;
/// Commands of a session that are not answered, unless the target node says otherwise.
pub(crate) const QUEUE_DEPTH_DEFAULT: u32 = 64;
/// The same, at most.
pub(crate) const QUEUE_DEPTH_MAX: u32 = 256;
/// Immediate commands beside those: initiators send one task management function at a time.
pub(crate) const IMMEDIATE_COMMANDS_MAX: u32 = 16;
/// Connections of a session, unless the options say otherwise: SPDK's default.
pub(crate) const SESSION_CONNECTIONS_DEFAULT: u32 = 2;
/// The same, at most. A login looks at each.
pub(crate) const SESSION_CONNECTIONS_MAX: u32 = 64;
/// Identifiers of sessions (TSIH) that there are.
pub(crate) const SESSIONS_MAX: u32 = u16::MAX as u32;
/// DefaultTime2Wait, in seconds, unless the options say otherwise: the default of RFC 7143, section 13.15.
pub(crate) const TIME2WAIT_DEFAULT_S: u32 = 2;
/// The same, at most.
pub(crate) const TIME2WAIT_MAX_S: u32 = 3600;
/// Task management functions that wait for tasks to end, and logouts that wait for connections.
pub(crate) const FUNCTIONS_MAX: usize = 16;
/// Most data of a PDU that is received: MaxRecvDataSegmentLength of the target.
pub(crate) const RECEIVE_DATA_MAX: u32 = 256 << 10;
/// Most data of a burst: MaxBurstLength. A command has no more data.
pub(crate) const BURST_BYTES_MAX: u32 = 1 << 20;
/// Most data that comes without an R2T: FirstBurstLength. It needs memory at once, for each command of the
/// queue.
pub(crate) const FIRST_BURST_BYTES_MAX: u32 = 64 << 10;
/// R2Ts of a command that are not answered: MaxOutstandingR2T.
pub(crate) const R2TS_MAX: u32 = 4;
/// Bytes of buffers that the commands and unsent answers of a connection have at most, once it has moved
/// data, apart from unsolicited data. One larger command is admitted alone.
pub(crate) const QUOTA_BYTES: usize = 8 << 20;
/// PDUs that are not sent; above it nothing is received.
pub(crate) const UNSENT_PDUS_MAX: usize = 512;
/// Bytes on the heap of PDUs that are not sent, such as echoes of pings, which no share of memory counts;
/// from this on nothing is received. One PDU or command may add to it what it has.
pub(crate) const UNSENT_HEAP_BYTES_MAX: usize = 128 << 10;
/// Bytes received beside payload: a header with its additional segments and digest, or several without.
pub(crate) const RECEIVE_BYTES: usize = 8 << 10;
/// Bytes received on a connection in one poll.
pub(crate) const RECEIVE_BUDGET: usize = 1 << 20;
/// Text of one login or text request, over all its PDUs.
pub(crate) const TEXT_BYTES_MAX: usize = 64 << 10;
/// Requests of a login: initiators need three to six.
pub(crate) const LOGIN_REQUESTS_MAX: u32 = 64;
/// Time for a login.
pub(crate) const LOGIN_TIMEOUT_NS: u64 = 15_000_000_000;
/// Time that a login waits for the session that it replaces.
pub(crate) const REINSTATEMENT_TIMEOUT_NS: u64 = 10_000_000_000;
/// Interval at which is checked whether an initiator is silent.
pub(crate) const CHECK_NS: u64 = 5_000_000_000;
/// Initiator names or netmasks of an initiator group.
pub(crate) const GROUP_ENTRIES_MAX: usize = 256;
/// Bytes of a user name or secret of CHAP.
pub(crate) const SECRET_BYTES_MAX: usize = 255;
/// Portals of a portal group, and maps of a target node.
pub(crate) const PORTALS_MAX: usize = 64;
/// Bytes of data of commands that wait until their connection has moved. With more it does not receive on,
/// and the move ends after its time if data of earlier commands is behind that.
pub(crate) const DEFERRED_BYTES_MAX: usize = 1 << 20;
